"""CPU kernels as the course has them in files: right ones, in both forms."""

from __future__ import annotations

COURSE_2019 = """
#ifndef MXNET_OPERATOR_NEW_FORWARD_H_
#define MXNET_OPERATOR_NEW_FORWARD_H_
#include <mxnet/base.h>

namespace mxnet {
namespace op {

template <typename cpu, typename DType>
void forward(mshadow::Tensor<cpu, 4, DType> &y, const mshadow::Tensor<cpu, 4, DType> &x,
             const mshadow::Tensor<cpu, 4, DType> &k) {
  const int B = x.shape_[0], M = y.shape_[1], C = x.shape_[1], K = k.shape_[3];
  CHECK_EQ(y.size(2), x.size(2) - k.size(2) + 1) << "rows";
  for (int b = 0; b < B; ++b)
    for (int m = 0; m < M; ++m)
      for (unsigned h = 0; h < y.shape_[2]; ++h)
        for (unsigned w = 0; w < y.shape_[3]; ++w) {
          y[b][m][h][w] = 0;
          for (int c = 0; c < C; ++c)
            for (int p = 0; p < K; ++p)
              for (int q = 0; q < K; ++q)
                y[b][m][h][w] += x[b][c][h + p][w + q] * k[m][c][p][q];
        }
}

}
}
#endif
"""

_COURSE_2020 = """
#include "cpu-new-forward.h"

void conv_forward_cpu(float *output, const float *input, const float *mask, const int Batch,
                      const int Map_out, const int Channel, const int Height, const int Width,
                      const int K%s) {
  const int rows = (Height - K) / %s + 1, columns = (Width - K) / %s + 1;
#define out_4d(b, m, h, w) output[((b * Map_out + m) * rows + h) * columns + w]
#define in_4d(b, c, h, w) input[((b * Channel + c) * Height + h) * Width + w]
#define mask_4d(m, c, p, q) mask[((m * Channel + c) * K + p) * K + q]
#pragma omp parallel for
  for (int b = 0; b < Batch; ++b)
    for (int m = 0; m < Map_out; ++m)
      for (int h = 0; h < rows; ++h)
        for (int w = 0; w < columns; ++w) {
          float sum = 0;
          for (int c = 0; c < Channel; ++c)
            for (int p = 0; p < K; ++p)
              for (int q = 0; q < K; ++q)
                sum += in_4d(b, c, (h * %s + p), (w * %s + q)) * mask_4d(m, c, p, q);
          out_4d(b, m, h, w) = sum;
        }
}
"""
COURSE_2020 = _COURSE_2020 % ("", 1, 1, 1, 1)
WITH_STRIDE = _COURSE_2020 % (", const int S", "S", "S", "S", "S")

# By the name of a file: its text.
FORMS = {
    "new-forward.h": COURSE_2019,
    "cpu-new-forward.cc": COURSE_2020,
    "with-stride.cc": WITH_STRIDE,
}
