/* A pool of threads that together run the chunks of one phase after another.
 *
 * Each thread claims one chunk at a time from a shared counter, so a phase does not wait for a thread that the system
 * has given no processor. An OpenMP region, in contrast, ends when its last thread has arrived.
 */

#include "workers.h"

#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* Number of pauses, about 50 microseconds, for which an idle thread waits before it sleeps. The phases of a step follow
 * each other faster than the system wakes a thread, but between two steps the processor belongs to others. */
#define IDLE_PAUSES 1500
static struct pool {
    pthread_mutex_t entered;
    int num_started, num_helpers; /* threads in addition to the caller: all of them, and those that may work */
    _Atomic int num_awake;        /* of the started threads */
    /* Number of the phase (32 bits), its number of chunks (16 bits) and its next chunk (16 bits). One word holds all
     * that a claim depends on, so a compare-and-swap succeeds only for the current phase. */
    _Atomic uint64_t claims;
    _Atomic int num_finished;
    chunk_function run; /* of the current phase; read only after a claim, and not changed until all are finished */
    const void *context;
    sem_t wake; /* all zeros are a semaphore of value 0 */
} pool = {.entered = PTHREAD_MUTEX_INITIALIZER};

/* A forked process has none of the threads. It starts its own on first use. */
static void forget_threads(void) { pool = (struct pool){.entered = PTHREAD_MUTEX_INITIALIZER}; }

__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(NULL, NULL, forget_threads); }

static void pause_briefly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Claim and run a chunk of the current phase. Return false if none is left. */
static bool run_chunk(void) {
    uint64_t claims = atomic_load(&pool.claims);
    uint16_t next = (uint16_t)claims, chunks = (uint16_t)(claims >> 16);
    if (next >= chunks)
        return false;
    if (atomic_compare_exchange_strong(&pool.claims, &claims, claims + 1)) {
        pool.run(pool.context, next);
        atomic_fetch_add(&pool.num_finished, 1);
    }
    return true;
}

static void *work(void *unused) {
    for (;;) {
        for (int pauses = 0; pauses < IDLE_PAUSES; pauses++) {
            while (run_chunk())
                pauses = 0;
            pause_briefly();
        }
        atomic_fetch_sub(&pool.num_awake, 1);
        sem_wait(&pool.wake);
    }
    return unused;
}

static bool start_thread(void) {
    pthread_t thread;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for the threads of Python */
    bool is_started = pthread_create(&thread, NULL, work, NULL) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (is_started) {
        pthread_detach(thread);
        pool.num_started++;
        atomic_fetch_add(&pool.num_awake, 1);
    }
    return is_started;
}

void enter_pool(int threads) {
    pthread_mutex_lock(&pool.entered);
    while (pool.num_started < threads - 1 && start_thread())
        ;
    pool.num_helpers = pool.num_started < threads - 1 ? pool.num_started : threads - 1;
}

void leave_pool(void) { pthread_mutex_unlock(&pool.entered); }

void run_phase(chunk_function run, const void *context, int chunks) {
    if (chunks == 1 || pool.num_helpers == 0) {
        for (int chunk = 0; chunk < chunks; chunk++)
            run(context, chunk);
        return;
    }
    pool.run = run;
    pool.context = context;
    atomic_store(&pool.num_finished, 0);
    uint64_t phase = (atomic_load(&pool.claims) >> 32) + 1;
    atomic_store(&pool.claims, phase << 32 | (uint64_t)chunks << 16);
    /* The difference is read once, because a thread may wake, finish and sleep again before the next line. */
    for (int missing = pool.num_helpers - atomic_load(&pool.num_awake); missing > 0; missing--) {
        atomic_fetch_add(&pool.num_awake, 1);
        sem_post(&pool.wake);
    }
    while (run_chunk())
        ;
    for (int pauses = 0; atomic_load(&pool.num_finished) < chunks; pauses++) {
        pause_briefly();
        if (pauses > IDLE_PAUSES)
            sched_yield(); /* the last chunk may wait for this processor */
    }
}
