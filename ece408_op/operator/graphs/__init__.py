"""The graphs that MXNet is handed: recognised, guarded, compiled, fused, bound."""
