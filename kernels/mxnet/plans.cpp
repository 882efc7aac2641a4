#include "plans.h"

#include <mxnet/lib_api.h>

namespace ece408 {

// Never destroyed: MXNet's threads may still be running when the process ends.
Plans& plans() {
    static Plans* const all = new Plans;
    return *all;
}

}  // namespace ece408

mxnet::ext::MXReturnValue initialize(int) { return mxnet::ext::MX_SUCCESS; }

void ece408_forward_use(ece408_ask* ask, ece408_compute* compute, ece408_report* report,
                        const ece408_others* others, const char* key) {
    ece408::plans().use(ask, compute, report, *others, key);
}

void ece408_forward_forget(void) { ece408::plans().forget(); }

void ece408_forward_launch(ece408_plan* plan, const ece408_launch* launch) {
    static_cast<ece408::Plan*>(plan)->launches.emplace_back(*launch);
}

void ece408_forward_log(int is_open) { ece408::plans().log(is_open != 0); }
