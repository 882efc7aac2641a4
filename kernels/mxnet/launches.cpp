#include "launches.h"

namespace ece408 {

ece408_driver& driver() {
    static ece408_driver functions{};
    return functions;
}

}  // namespace ece408

void ece408_forward_drive(const ece408_driver* driver) { ece408::driver() = *driver; }
