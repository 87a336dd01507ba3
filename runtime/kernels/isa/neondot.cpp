#define NYBBLE_ISA neondot
#define NYBBLE_NAME "neondot"
#define NYBBLE_SIMD "../simd/neon.h"
#include "table.h"
