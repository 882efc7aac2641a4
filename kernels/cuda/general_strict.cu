// General, as exact as float32 results can be: sums of at most 8 products are added up in double. So
// no element is off by more than 5.4e-7 of the sum of its terms' magnitudes, whatever the numbers.
//
// Measured: fa19_1 4.58 ms, fa19_2 17.45 ms; batch 10000, NVIDIA H200.
#define TOTAL double
#include "general.cu"
