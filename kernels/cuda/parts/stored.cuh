// The types of x and y in memory, float or __half. Arithmetic is in float.
#pragma once

#if defined(HALF)
#include <cuda_fp16.h>
#endif
#ifndef X_TYPE
#define X_TYPE float
#endif
#ifndef Y_TYPE
#define Y_TYPE float
#endif
