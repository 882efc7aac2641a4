// General, as exact as float32 results can be: sums of at most 8 products are added up in double. So
// no element is off by more than 5.4e-7 of the sum of its terms' magnitudes, whatever the numbers.
//
// Measured: not yet.
#define TOTAL double
#include "general.cu"
