// CUDA's built-in vector types, with its alignments (CUDA C++ Programming Guide, "Built-in vector types").
#pragma once

#define EMULATION_VECTOR(T, name, align2, align4)                                                         \
  struct name##1 { T x; };                                                                                \
  struct alignas(align2) name##2 { T x, y; };                                                             \
  struct name##3 { T x, y, z; };                                                                          \
  struct alignas(align4) name##4 { T x, y, z, w; };                                                       \
  constexpr inline name##1 make_##name##1(T x) { return {x}; }                                            \
  constexpr inline name##2 make_##name##2(T x, T y) { return {x, y}; }                                    \
  constexpr inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }                            \
  constexpr inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
EMULATION_VECTOR(signed char, char, 2, 4)
EMULATION_VECTOR(unsigned char, uchar, 2, 4)
EMULATION_VECTOR(short, short, 4, 8)
EMULATION_VECTOR(unsigned short, ushort, 4, 8)
EMULATION_VECTOR(int, int, 8, 16)
EMULATION_VECTOR(unsigned int, uint, 8, 16)
EMULATION_VECTOR(float, float, 8, 16)
EMULATION_VECTOR(long long, longlong, 16, 16)
EMULATION_VECTOR(unsigned long long, ulonglong, 16, 16)
EMULATION_VECTOR(double, double, 16, 16)
#undef EMULATION_VECTOR

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
