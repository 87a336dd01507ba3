#define NYBBLE_ISA avx2
#define NYBBLE_NAME "avx2"
#define NYBBLE_SIMD "../simd/avx2.h"
#include "table.h"
