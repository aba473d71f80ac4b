/* Where a test may come between two steps of a reader: CORE_STEP is a call there, and nothing otherwise. */
#ifndef KVSTORE_CORE_STEPS_H
#define KVSTORE_CORE_STEPS_H

#ifdef KVSTORE_CORE_STEPS
extern void (*core_step)(const char *reached);
#define CORE_STEP(reached) core_step(reached)
#else
#define CORE_STEP(reached) ((void)0)
#endif

#endif
