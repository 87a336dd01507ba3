"""The C++ extension. Absent from the pure-Python wheel: import it inside a `try`."""

def cpu_info() -> dict[str, object]:
    """What this CPU is: `isa` (list of instruction sets that may be used), `brand`, and `caches`
    (list of dicts: `level`, `type`, `bytes`, `line_bytes`, `shared_by`)."""
