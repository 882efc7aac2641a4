// The exports of a compiled CPU kernel file: the interface of a forward kernel of
// kernels/cpu/api/ece408.h, and a message. Each form's source includes the file and defines
// `compute`.
#pragma once

#include "guarded.h"

#ifdef _OPENMP
#include <omp.h>
#endif

namespace ece408_file {

void compute(const ece408_problem& p, const float* x, const float* w, float* y);

// Sets the number of threads of the file's OpenMP loops for a scope.
class Threads {
public:
#ifdef _OPENMP
    explicit Threads(int count) : before_(omp_get_max_threads()) { omp_set_num_threads(count); }
    ~Threads() { omp_set_num_threads(before_); }

private:
    int before_;
#else
    explicit Threads(int) {}
#endif
};

}  // namespace ece408_file

extern "C" ECE408_EXPORT int ece408_file_forward(const ece408_problem* problem, const float* x,
                                                 const float* w, const float*, float* y, int,
                                                 int threads, int, int) {
    return ece408_file::guarded([=] {
        const ece408_file::Threads scope(threads);
        ece408_file::compute(*problem, x, w, y);
    });
}
