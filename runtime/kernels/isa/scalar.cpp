#define NYBBLE_ISA scalar
#define NYBBLE_NAME "scalar"
#define NYBBLE_SIMD "../simd/scalar.h"
#include "table.h"
