/* A pool of threads that together run the chunks of one phase after another. */

#pragma once

/* Runs one chunk of a phase. */
typedef void (*chunk_function)(const void *context, int chunk);

/* Reserve the pool for the calling thread, and let at most `threads` threads work, including the caller. Threads that
 * are still awake from a larger pool may work until they are idle. */
void enter_pool(int threads);
void leave_pool(void);

/* Run `chunks` chunks, at most 65535, and return when all are finished. The caller must have entered the pool. */
void run_phase(chunk_function run, const void *context, int chunks);
