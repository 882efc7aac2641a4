// Pooling windows: their kind, and the numbers of rows and columns of the result.
#pragma once

#include "shape.cuh"

#define LARGEST 0
#define AVERAGE 1
#define SUM 2
#ifndef KIND
#define KIND LARGEST
#endif
#ifndef WITH_BORDER
#define WITH_BORDER 1  // an average counts the padding's zeros
#endif
#ifndef OUT_H
#define OUT_H kOutH
#endif
#ifndef OUT_W
#define OUT_W kOutW
#endif
