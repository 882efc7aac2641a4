// Names of constants that are compiled once per instruction set: `name_avx512` and so on.
#pragma once

// The name of this build, in a file that is compiled for the instruction set ECE408_ISA.
#define ECE408_THIS_BUILD(name) ECE408_BUILD_(name, ECE408_ISA)
#define ECE408_BUILD_(name, isa) ECE408_JOIN_(name, isa)
#define ECE408_JOIN_(name, isa) name##_##isa

// Declares all builds of a constant, and lists them by the numbers of enum ece408_isa.
#if defined(__x86_64__)
#define ECE408_DECLARE_BUILDS(Type, name) \
    extern const Type name##_baseline, name##_avx2, name##_avx512;
#define ECE408_BUILDS(name) {&name##_baseline, &name##_avx2, &name##_avx512}
#else
#define ECE408_DECLARE_BUILDS(Type, name) extern const Type name##_baseline;
#define ECE408_BUILDS(name) {&name##_baseline}
#endif
