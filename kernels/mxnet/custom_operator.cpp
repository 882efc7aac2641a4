// Functions between MXNet and an operator written in Python.
#include <mxnet/c_api.h>

#include <algorithm>
#include <tuple>
#include <type_traits>
#include <utility>

#include "callbacks.h"
#include "python_calls.h"

namespace {

using ece408::ask_python;
using ece408::run_python;
using Function = int (*)(void);

CustomOpPropCreator python_creator = nullptr;

// MXNet stores functions of all types as one type.
template <typename To, typename From>
To as(From function) {
    return reinterpret_cast<To>(reinterpret_cast<void (*)()>(function));
}

// Python's functions of descriptions of operators, then of operators, by MXNet's numbers.
using Types = std::tuple<CustomOpDelFunc, CustomOpListFunc, CustomOpListFunc, CustomOpListFunc,
                         CustomOpInferShapeFunc, CustomOpBwdDepFunc, CustomOpCreateFunc,
                         CustomOpInferTypeFunc, CustomOpInferStorageTypeFunc,
                         CustomOpBackwardInferStorageTypeFunc, CustomOpDelFunc, CustomOpFBFunc,
                         CustomOpFBFunc>;
Function python[std::tuple_size<Types>::value];

template <size_t NUMBER, typename... Arguments>
int passed(Arguments... arguments) {
    using Type = int (*)(Arguments...);
    constexpr bool on_mxnets_threads =
        std::is_same<Type, CustomOpFBFunc>::value || std::is_same<Type, CustomOpDelFunc>::value;
    const auto call = [=] { return as<Type>(python[NUMBER])(arguments...); };
    return on_mxnets_threads ? run_python(call) : ask_python(call);
}

template <size_t... NUMBERS>
void stand_before(Function* functions, std::index_sequence<NUMBERS...>) {
    std::copy_n(functions, sizeof...(NUMBERS), python);
    ((functions[NUMBERS] = as<Function, std::tuple_element_t<NUMBERS, Types>>(passed<NUMBERS>)),
     ...);
}

int nothing(void*) { return 1; }

int create(const char* type, int count, const char** keys, const char** values,
           MXCallbackList* made) {
    // MXNet calls this function even if the operator could not be made.
    static Function remove_nothing[] = {as<Function>(nothing)};
    static void* no_context[] = {nullptr};
    *made = {1, remove_nothing, no_context};
    return ask_python([=] { return python_creator(type, count, keys, values, made); });
}

}  // namespace

CustomOpPropCreator ece408_guarded(CustomOpPropCreator creator, int (**functions)(void)) {
    stand_before(functions, std::make_index_sequence<std::tuple_size<Types>::value>());
    python_creator = creator;
    return create;
}
