// Functions between MXNet and an operator written in Python.
#include <mxnet/c_api.h>

#include <cstddef>
#include <tuple>
#include <type_traits>

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

// Python's functions of one description of an operator, or of one operator. Each function of ours
// gets it as its last argument; Python's own gets a context there.
//
// Python frees the target of `python` when it ends: read it only within a call into Python.
struct Functions {
    MXCallbackList python;
    void* contexts[kCustomOpPropBackwardInferStorageType + 1];
};

// Function number NUMBER, of one type.
template <int NUMBER, typename Type>
struct Passed;

template <int NUMBER, typename... Arguments>
struct Passed<NUMBER, int (*)(Arguments...)> {
    using Type = int (*)(Arguments...);

    static int call(Arguments... arguments) {
        const auto call = [=] {
            auto given = std::make_tuple(arguments...);
            auto& context = std::get<sizeof...(Arguments) - 1>(given);
            const MXCallbackList& python = static_cast<const Functions*>(context)->python;
            context = python.contexts[NUMBER];
            return std::apply(as<Type>(python.callbacks[NUMBER]), given);
        };
        return std::is_same<Type, CustomOpFBFunc>::value ? run_python(call) : ask_python(call);
    }
};

template <int NUMBER, typename Type>
Function passed() {
    return as<Function>(Passed<NUMBER, Type>::call);
}

int remove(void* context) {
    const auto functions = static_cast<Functions*>(context);
    const MXCallbackList& python = functions->python;
    run_python([&] { return as<CustomOpDelFunc>(python.callbacks[0])(python.contexts[0]); });
    delete functions;
    return 1;
}

// Replaces the functions that Python has made by ours.
template <size_t COUNT>
void stand_before(MXCallbackList* list, Function (&ours)[COUNT]) {
    const auto functions = new Functions{*list, {}};
    for (void*& context : functions->contexts) context = functions;
    list->callbacks = ours;
    list->contexts = functions->contexts;
}

int create_operator(const char* device, int count, unsigned** shapes, const int* dimensions,
                    const int* types, MXCallbackList* made, void* context) {
    static Function ours[] = {
        as<Function>(remove),
        passed<kCustomOpForward, CustomOpFBFunc>(),
        passed<kCustomOpBackward, CustomOpFBFunc>(),
    };
    if (!Passed<kCustomOpPropCreateOperator, CustomOpCreateFunc>::call(
            device, count, shapes, dimensions, types, made, context))
        return 0;
    stand_before(made, ours);
    return 1;
}

int nothing(void*) { return 1; }

int create(const char* type, int count, const char** keys, const char** values,
           MXCallbackList* made) {
    static Function ours[] = {
        as<Function>(remove),
        passed<kCustomOpPropListArguments, CustomOpListFunc>(),
        passed<kCustomOpPropListOutputs, CustomOpListFunc>(),
        passed<kCustomOpPropListAuxiliaryStates, CustomOpListFunc>(),
        passed<kCustomOpPropInferShape, CustomOpInferShapeFunc>(),
        passed<kCustomOpPropDeclareBackwardDependency, CustomOpBwdDepFunc>(),
        as<Function>(create_operator),
        passed<kCustomOpPropInferType, CustomOpInferTypeFunc>(),
        passed<kCustomOpPropInferStorageType, CustomOpInferStorageTypeFunc>(),
        passed<kCustomOpPropBackwardInferStorageType, CustomOpBackwardInferStorageTypeFunc>(),
    };
    // MXNet calls this function even if the operator could not be made.
    static Function remove_nothing[] = {as<Function>(nothing)};
    static void* no_context[] = {nullptr};
    *made = {1, remove_nothing, no_context};
    if (!ask_python([=] { return python_creator(type, count, keys, values, made); })) return 0;
    stand_before(made, ours);
    return 1;
}

}  // namespace

ece408_creator* ece408_guarded(ece408_creator* creator) {
    python_creator = as<CustomOpPropCreator>(creator);
    return as<ece408_creator*>(create);
}
