// The general kernels, once per instruction set and type; general.cpp defines them all.
#pragma once

#include "ece408.h"
#include "half.h"

namespace ece408 {

// The three directions for one type, on arrays that are not null; each returns a status.
template <class T>
struct General {
    int (*forward)(const ece408_problem&, const T* x, const T* w, const T* bias, T* y,
                   bool accumulate, int threads);
    int (*backward_data)(const ece408_problem&, const T* w, const T* dy, T* dx, bool accumulate,
                         int threads);
    int (*backward_weight)(const ece408_problem&, const T* x, const T* dy, T* dw, bool accumulate,
                           int threads);
};

struct GeneralKernels {
    General<float> f32;
    General<double> f64;
    General<uint16_t> f16;  // the bits of half precision
};

extern const GeneralKernels general_baseline;
#if defined(__x86_64__)
extern const GeneralKernels general_avx2;
extern const GeneralKernels general_avx512;
#endif

}  // namespace ece408
