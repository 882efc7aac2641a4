// Pooling windows: their kind, and the numbers of rows and columns of the result.
#pragma once

#include "shape.cuh"
#include "stored.cuh"

#define LARGEST 0
#define AVERAGE 1
#define SUM 2
#ifndef KIND
#define KIND LARGEST
#define WITH_BORDER 1  // an average counts the padding's zeros
#define OUT_H kOutH
#define OUT_W kOutW
#endif
