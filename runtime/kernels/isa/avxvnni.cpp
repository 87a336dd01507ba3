#define NYBBLE_ISA avxvnni
#define NYBBLE_NAME "avxvnni"
#define NYBBLE_SIMD "../simd/avx2.h"
#define NYBBLE_AVX_VNNI
#include "table.h"
