#define NYBBLE_ISA avx512vnni
#define NYBBLE_NAME "avx512vnni"
#define NYBBLE_SIMD "../simd/avx512.h"
#include "table.h"
