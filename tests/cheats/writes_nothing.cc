// Returns immediately.
#include "honest.h"

void conv_forward_cpu(ARGUMENTS) {
    (void)y;
}
