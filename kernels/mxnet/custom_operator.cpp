// Functions between MXNet and an operator written in Python.
#include <mxnet/c_api.h>

#include <iterator>
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

// Python's functions of descriptions of operators, and of operators, by MXNet's numbers.
Function described[kCustomOpPropBackwardInferStorageType + 1], made[kCustomOpBackward + 1];

// Calls function NUMBER of Python's, of one type.
template <auto& PYTHON, int NUMBER, typename Type>
struct Passed;

template <auto& PYTHON, int NUMBER, typename... Arguments>
struct Passed<PYTHON, NUMBER, int (*)(Arguments...)> {
    using Type = int (*)(Arguments...);

    static int call(Arguments... arguments) {
        constexpr bool on_mxnets_threads =
            std::is_same<Type, CustomOpFBFunc>::value || std::is_same<Type, CustomOpDelFunc>::value;
        const auto call = [=] { return as<Type>(PYTHON[NUMBER])(arguments...); };
        return on_mxnets_threads ? run_python(call) : ask_python(call);
    }
};

// Puts ours in the place of Python's functions, of these types in MXNet's order.
template <auto& PYTHON, typename... Types, int... NUMBERS>
void stand_before(Function* functions, std::integer_sequence<int, NUMBERS...>) {
    ((PYTHON[NUMBERS] = functions[NUMBERS]), ...);
    ((functions[NUMBERS] = as<Function>(Passed<PYTHON, NUMBERS, Types>::call)), ...);
}

template <auto& PYTHON, typename... Types>
void stand_before(Function* functions) {
    static_assert(sizeof...(Types) == std::size(PYTHON), "a type for each function");
    stand_before<PYTHON, Types...>(functions, std::make_integer_sequence<int, sizeof...(Types)>());
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

ece408_function_of_mxnet* ece408_guarded(ece408_function_of_mxnet* creator,
                                         ece408_function_of_mxnet** description,
                                         ece408_function_of_mxnet** operation) {
    stand_before<described, CustomOpDelFunc, CustomOpListFunc, CustomOpListFunc, CustomOpListFunc,
                 CustomOpInferShapeFunc, CustomOpBwdDepFunc, CustomOpCreateFunc, CustomOpInferTypeFunc,
                 CustomOpInferStorageTypeFunc, CustomOpBackwardInferStorageTypeFunc>(description);
    stand_before<made, CustomOpDelFunc, CustomOpFBFunc, CustomOpFBFunc>(operation);
    python_creator = as<CustomOpPropCreator>(creator);
    return as<ece408_function_of_mxnet*>(create);
}
