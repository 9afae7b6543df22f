/* Internal interfaces of the simulated CANN. One lock, sim_lock, protects devices, memory, streams and events. The lock is
 * released while a task runs, so that a collective that waits for other ranks does not block other threads. */
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

/* trace.c: numbers of calls, traces and injected failures. */
struct sim_function {
    const char *name;
    atomic_long calls;
    struct sim_function *next; /* in the list of functions called at least once */
    atomic_bool listed;
};

/* Counts one call and returns the code of its injected failure, or 0. The format describes the call's arguments. */
int sim_enter(struct sim_function *function, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* The first statement of each CANN function. */
#define CALLED(...)                                                          \
    do {                                                                     \
        static struct sim_function function = {.name = __func__};            \
        int injected = sim_enter(&function, __VA_ARGS__);                    \
        if (injected) return injected;                                       \
    } while (0)

/* Sets the message for this thread's next aclGetRecentErrMsg and returns code. */
int sim_error(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));
long sim_setting(const char *name, long fallback, long least, long most);

/* counts.c */
enum sim_counter { SIM_SYNCS, SIM_LAUNCHES, SIM_HIDDEN_COPIES, SIM_AICPU, SIM_UPLOADS, SIM_DOWNLOADS, SIM_PAGEABLE_COPIES, SIM_COUNTERS };
void sim_count(enum sim_counter counter);
void sim_count_sync(void);
/* Counts a copy. A copy to the host that blocks is also a wait, unless torch_npu has just synchronized the stream for it. */
void sim_count_copy(aclrtMemcpyKind kind, bool blocks);
void sim_work(void); /* notes new work, so that the next blocking copy counts as a wait */
void sim_counts_reset(void);

extern pthread_mutex_t sim_lock;

/* devices.c */
int sim_device_count(void);
int sim_current_device(void); /* of this thread, or -1 */
bool sim_registers_memory(void); /* whether the product can register host memory */

/* memory.c */
enum sim_kind { SIM_FREE, SIM_DEVICE, SIM_PINNED, SIM_REGISTERED };
struct sim_range {
    char *start;
    size_t size;
    enum sim_kind kind;
    int device; /* set for SIM_DEVICE only */
};
/* Returns the range that contains all of [p, p + n), or SIM_FREE. sim_lock must be held. */
struct sim_range sim_range_of(const void *p, size_t n);
/* Returns the current kind of [p, p + n). For this function and the next ones, sim_lock must not be held. */
enum sim_kind sim_kind_of(const void *p, size_t n);
/* Returns 0 if the copy is allowed, or the code of its refusal. */
int sim_check_copy(const void *dst, size_t room, const void *src, size_t n, aclrtMemcpyKind kind);
void sim_poison(void *p, size_t n);
void sim_zero(void *p, size_t n);
/* Copies n bytes if source and target still have the kinds that they had when the copy was queued. */
int sim_move(void *dst, enum sim_kind dst_kind, const void *src, enum sim_kind src_kind, size_t n);

struct sim_graph;
struct sim_group;

/* streams.c: a stream is a queue of tasks. They run when something synchronizes, drains or waits for the stream. */
struct sim_stream;
struct sim_task {
    int (*run)(struct sim_task *task);   /* called without sim_lock; returns a code of ACL */
    void (*drop)(struct sim_task *task); /* frees the task and its resources */
    struct sim_stream *other;            /* if set, its tasks up to other_seq run first */
    uint64_t other_seq;
    struct sim_moment *after; /* if set, the task starts after this moment of the other stream */
    uint64_t cost_ns;         /* virtual time that the task takes, see virtual_time.c */
    bool busy;                /* whether the device computes or communicates during this time */
    bool impatient; /* also runs if nothing waits for the stream, because other ranks or the host may wait for the task */
    uint64_t seq;   /* the queue sets the remaining fields */
    uint64_t issued_ns, start_ns;
    struct sim_task *next;
};
struct sim_stream *sim_stream_of(aclrtStream stream); /* NULL: the default stream of this thread's device; sim_lock must be held */
void *sim_new_task(size_t size, int (*run)(struct sim_task *), void (*drop)(struct sim_task *));
/* sim_lock must be held for these functions. It is released while a task runs. */
/* Returns the task's number in the stream. The graph gets the task if the stream is captured. */
uint64_t sim_queue(struct sim_stream *stream, struct sim_task *task);
bool sim_has_run(const struct sim_stream *stream, uint64_t seq);
int sim_run(struct sim_stream *stream, uint64_t seq); /* runs all tasks up to seq; returns the stream's error or 0 */
void sim_run_one(struct sim_stream *stream);          /* runs the next task unless it is impatient */

/* Checks that the stream belongs to this thread's device, which launches, records and waits of the host require. */
int sim_check_device(const struct sim_stream *stream);
int sim_stream_id(const struct sim_stream *stream);
bool sim_is_default(const struct sim_stream *stream);
struct sim_graph *sim_graph_of(const struct sim_stream *stream);  /* the graph that captures the stream, or NULL */
struct sim_group *sim_update_of(const struct sim_stream *stream); /* the task group that the stream updates, or NULL */
void sim_set_update(struct sim_stream *stream, struct sim_group *group);
void sim_join_capture(struct sim_stream *stream, struct sim_graph *graph);
uint64_t sim_captured(const struct sim_stream *stream);                 /* number of captured tasks of the stream */
void sim_note_joined(struct sim_stream *stream, uint64_t captured);     /* a stream of the capture waits for these tasks */
bool sim_leave_capture(struct sim_graph *graph, struct sim_stream *origin); /* returns whether a stream was not joined */

/* order.c: work with a clock runs after the step of each stream in the clock. sim_lock must be held for these functions. */
struct sim_clock {
    uint64_t *steps;
    size_t count;
};
uint64_t sim_clock_of(const struct sim_clock *clock, int stream);
void sim_clock_join(struct sim_clock *clock, const struct sim_clock *other);
void sim_clock_set(struct sim_clock *clock, int stream, uint64_t step);
struct sim_clock *sim_host_clock(void);
void sim_host_has_waited(const struct sim_clock *clock);
struct sim_clock *sim_stream_clock(struct sim_stream *stream); /* includes the host's clock; defined in streams.c */
uint64_t sim_step(struct sim_stream *stream);                  /* starts the stream's next step; defined in streams.c */
/* Return 0, or the code of a race with another stream's access to the range. */
int sim_note_read(struct sim_stream *stream, const void *p, size_t n);
int sim_note_write(struct sim_stream *stream, void *p, size_t n);
int sim_note_host(const void *p, size_t n, bool writes);
void sim_forget(const void *p, size_t n); /* forgets freed memory */

uint64_t sim_now_ns(void);

/* virtual_time.c: sim_lock must be held for all of these functions. */
enum sim_call { SIM_CALL_LAUNCH, SIM_CALL_COPY, SIM_CALL_SYNC, SIM_CALL_EVENT };
uint64_t sim_host_calls(enum sim_call call); /* adds the cost of a call to this thread's clock; returns the time */
uint64_t sim_host_now(void);
void sim_host_waits_until(uint64_t ns);
bool sim_host_is_past(uint64_t ns);
uint64_t sim_bus_ns(size_t bytes);  /* of a copy between host and device */
uint64_t sim_link_ns(size_t bytes); /* of a collective */
uint64_t sim_take_time(const struct sim_task *task, int device); /* returns the end of a task with a start */
struct sim_moment { /* when a stream reaches a record of an event */
    atomic_int references;
    uint64_t ns;
};
struct sim_moment *sim_new_moment(void);
struct sim_moment *sim_keep_moment(struct sim_moment *moment); /* NULL is allowed, also for the next function */
void sim_drop_moment(struct sim_moment *moment);
uint64_t sim_stream_ns(const struct sim_stream *stream); /* the end of the last task; defined in streams.c */

/* graphs.c: tasks of a captured stream. sim_lock must be held. */
void sim_capture(struct sim_graph *graph, struct sim_task *task);
void sim_capture_access(struct sim_graph *graph, const void *p, size_t n, bool writes);
/* Returns 0, or `code` if a capture forbids this call, which also invalidates the capture. */
int sim_refuse_in_capture(int code, const char *what);
