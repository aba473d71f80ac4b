"""``kvstore bench`` measures parts of kvstore on this machine; ``kvstore plan`` says what a trace would gain."""
