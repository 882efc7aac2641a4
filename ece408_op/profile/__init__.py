"""Profiler: records what a program does and how long each part takes; nvprof's columns."""
