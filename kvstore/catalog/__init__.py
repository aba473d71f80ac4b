"""The catalog: which page is in which slot of the arena, and which leaves next. Pure bookkeeping: no I/O."""
