/* What the parts of the simulated CANN know of one another. One lock, sim_lock, guards devices, memory, streams and events;
 * it is released while a task runs, so that a collective which waits for its peers stops nobody else. */
#pragma once
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <acl/acl.h>
#include <acl/acl_op_compiler.h>
#include <acl/acl_rt.h>
#include <acl/error_codes/rt_error_codes.h>

#define SIM_MAX_DEVICES 8
#define SIM_EXPORT __attribute__((visibility("default")))

/* trace.c: calls counted, written down on demand, and failing on demand. */
struct sim_function {
    const char *name;
    atomic_long calls;
    struct sim_function *next; /* in the list of those that were called at least once */
    atomic_bool listed;
};

/* Counts one call and returns the code that it is to fail with, 0 for none. format and what follows name its arguments. */
int sim_enter(struct sim_function *function, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* First statement of every function of CANN. */
#define CALLED(...)                                                          \
    do {                                                                     \
        static struct sim_function function = {.name = __func__};            \
        int injected = sim_enter(&function, __VA_ARGS__);                    \
        if (injected) return injected;                                       \
    } while (0)

/* The message that the next aclGetRecentErrMsg of this thread answers; returns code. */
int sim_error(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));
long sim_setting(const char *name, long fallback, long least, long most);
void sim_count_sync(void);
/* A copy to the host that blocks: torch_npu synchronises the stream just before it, and that is one wait, not two. */
void sim_count_copy_to_host(void);
void sim_work(void); /* something was queued or computed: the next such copy is a wait of its own */

extern pthread_mutex_t sim_lock;

/* devices.c */
int sim_device_count(void);
int sim_current_device(void); /* of this thread; -1 without one */

/* memory.c */
enum sim_kind { SIM_FREE, SIM_DEVICE, SIM_PINNED, SIM_REGISTERED };
struct sim_range {
    char *start;
    size_t size;
    enum sim_kind kind;
    int device; /* of SIM_DEVICE */
};
/* The range that holds all of [p, p + n); SIM_FREE where there is none. sim_lock is held. */
struct sim_range sim_range_of(const void *p, size_t n);
/* What all of [p, p + n) is now; sim_lock is not held, here and below. */
enum sim_kind sim_kind_of(const void *p, size_t n);
/* Whether a copy may be asked for: 0 or the code of its refusal. */
int sim_check_copy(const void *dst, size_t room, const void *src, size_t n, aclrtMemcpyKind kind);
/* Copies n bytes that were of these kinds when the copy was asked for, if they are so still. */
int sim_move(void *dst, enum sim_kind dst_kind, const void *src, enum sim_kind src_kind, size_t n);

/* streams.c: a queue of tasks each, which run when the stream is synchronised, drained or waited for. */
struct sim_stream;
struct sim_task {
    int (*run)(struct sim_task *task);   /* without sim_lock; returns a code of ACL */
    void (*drop)(struct sim_task *task); /* frees the task and what it owns */
    struct sim_stream *other;            /* if any: all up to other_seq there must have run before */
    uint64_t other_seq;
    bool impatient; /* a collective, which others wait for: the device gets on with it although nobody here asks */
    uint64_t seq;   /* the rest is the queue's */
    struct sim_task *next;
};
struct sim_stream *sim_stream_of(aclrtStream stream); /* null: the default stream of this thread's device; sim_lock is held */
void *sim_new_task(size_t size, int (*run)(struct sim_task *), void (*drop)(struct sim_task *));
/* In all of these sim_lock is held; those that run tasks let go of it meanwhile. */
uint64_t sim_queue(struct sim_stream *stream, struct sim_task *task); /* returns its number in the stream */
bool sim_has_run(const struct sim_stream *stream, uint64_t seq);
int sim_run(struct sim_stream *stream, uint64_t seq); /* all up to seq; returns the error of the stream, if any */
void sim_run_one(struct sim_stream *stream);          /* one task, unless there is none or it is impatient */

/* What is launched on a stream, recorded on it or waited for by the host must come from a thread of its device. */
int sim_check_device(const struct sim_stream *stream);
int sim_stream_id(const struct sim_stream *stream);

/* order.c: up to which step of each stream something comes later. sim_lock is held in all of these. */
struct sim_clock {
    uint64_t *steps;
    size_t count;
};
uint64_t sim_clock_of(const struct sim_clock *clock, int stream);
void sim_clock_join(struct sim_clock *clock, const struct sim_clock *other);
void sim_clock_set(struct sim_clock *clock, int stream, uint64_t step);
struct sim_clock *sim_host_clock(void);
void sim_host_has_waited(const struct sim_clock *clock);
struct sim_clock *sim_stream_clock(struct sim_stream *stream); /* with what the host has waited for; in streams.c, like */
uint64_t sim_step(struct sim_stream *stream);                  /* the next step of the stream */
/* 0, or the code of a race with what another stream did to the range. */
int sim_note_read(struct sim_stream *stream, const void *p, size_t n);
int sim_note_write(struct sim_stream *stream, void *p, size_t n);
int sim_note_host(const void *p, size_t n, bool writes);
void sim_forget(const void *p, size_t n); /* it was freed */

uint64_t sim_now_ns(void);
