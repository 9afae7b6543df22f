/* Streams: queues of tasks. They run when the host synchronizes, drains or queries a stream, or when another stream waits for
 * it. Tasks run as late as possible, so that a missing synchronization has an effect every time. Other processes wait for
 * collectives, so only these also run after ASCEND_SIM_PATIENCE_MS if nothing waits for the stream. */
#include "sim.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct sim_stream {
    int id, device;
    struct sim_task *head, **tail;
    uint64_t queued, done; /* numbers of the last queued task and the last finished task */
    int error;             /* the error of the first failed task; later tasks do not run */
    uint64_t time_ns;      /* virtual time at which the last finished task ended */
    uint64_t steps;        /* number of steps, see order.c */
    struct sim_clock clock;
    bool running, gets_on;
    struct sim_graph *graph;   /* that captures the stream */
    struct sim_group *update;  /* that the stream updates */
    uint64_t captured, joined; /* numbers of captured tasks, and of those that another stream of the capture waits for */
    pthread_cond_t changed;
    struct sim_stream *next;
};

static struct sim_stream *streams; /* newest first; destroyed streams stay, because events may refer to them */
static struct sim_stream *defaults[SIM_MAX_DEVICES];
static int stream_count;

static struct sim_stream *create(int device) {
    struct sim_stream *stream = calloc(1, sizeof *stream);
    if (!stream) abort();
    stream->id = stream_count++;
    stream->device = device;
    stream->tail = &stream->head;
    pthread_cond_init(&stream->changed, NULL);
    stream->next = streams;
    return streams = stream;
}

struct sim_stream *sim_stream_of(aclrtStream stream) {
    if (stream) return stream;
    int device = sim_current_device() < 0 ? 0 : sim_current_device();
    if (!defaults[device]) defaults[device] = create(device);
    return defaults[device];
}

int sim_stream_id(const struct sim_stream *stream) { return stream->id; }

bool sim_is_default(const struct sim_stream *stream) { return stream == defaults[stream->device]; }

struct sim_graph *sim_graph_of(const struct sim_stream *stream) { return stream->graph; }

struct sim_group *sim_update_of(const struct sim_stream *stream) { return stream->update; }

void sim_set_update(struct sim_stream *stream, struct sim_group *group) { stream->update = group; }

uint64_t sim_captured(const struct sim_stream *stream) { return stream->captured; }

void sim_join_capture(struct sim_stream *stream, struct sim_graph *graph) {
    if (stream->graph) return;
    stream->graph = graph;
    stream->captured = 1; /* joining requires a wait for the stream, even if it gets no tasks */
    stream->joined = 0;
}

void sim_note_joined(struct sim_stream *stream, uint64_t captured) {
    if (stream->joined < captured) stream->joined = captured;
}

bool sim_leave_capture(struct sim_graph *graph, struct sim_stream *origin) {
    bool unjoined = false;
    for (struct sim_stream *stream = streams; stream; stream = stream->next) {
        if (stream->graph != graph) continue;
        unjoined |= stream != origin && stream->joined < stream->captured;
        stream->graph = NULL;
    }
    return unjoined;
}

int sim_check_device(const struct sim_stream *stream) {
    int device = sim_current_device();
    if (stream->device == device) return 0;
    return sim_error(ACL_ERROR_RT_STREAM_CONTEXT, "a stream of device %d, and the thread's is %d", stream->device, device);
}

struct sim_clock *sim_stream_clock(struct sim_stream *stream) {
    sim_clock_join(&stream->clock, sim_host_clock());
    return &stream->clock;
}

uint64_t sim_step(struct sim_stream *stream) {
    sim_clock_set(&stream->clock, stream->id, ++stream->steps);
    return stream->steps;
}

void *sim_new_task(size_t size, int (*run)(struct sim_task *), void (*drop)(struct sim_task *)) {
    struct sim_task *task = calloc(1, size);
    if (!task) abort();
    task->run = run;
    task->drop = drop;
    return task;
}

static void free_task(struct sim_task *task) { free(task); }

/* Thread of a stream with collectives. After a pause, it runs the stream up to the last collective. */
static void *get_on(void *argument) {
    struct sim_stream *stream = argument;
    long patience_ms = sim_setting("ASCEND_SIM_PATIENCE_MS", 20, 0, 60000);
    pthread_mutex_lock(&sim_lock);
    for (;;) {
        uint64_t last = 0;
        for (struct sim_task *task = stream->head; task; task = task->next)
            if (task->impatient) last = task->seq;
        if (!last) {
            pthread_cond_wait(&stream->changed, &sim_lock);
            continue;
        }
        pthread_mutex_unlock(&sim_lock);
        struct timespec pause = {patience_ms / 1000, patience_ms % 1000 * 1000000};
        nanosleep(&pause, NULL);
        pthread_mutex_lock(&sim_lock);
        sim_run(stream, last);
    }
    return NULL;
}

uint64_t sim_stream_ns(const struct sim_stream *stream) { return stream->time_ns; }

uint64_t sim_queue(struct sim_stream *stream, struct sim_task *task) {
    if (stream->graph) {
        sim_capture(stream->graph, task);
        stream->captured++;
        return 0;
    }
    sim_work();
    task->issued_ns = sim_host_now();
    task->seq = ++stream->queued;
    *stream->tail = task;
    stream->tail = &task->next;
    if (task->impatient && !stream->gets_on) {
        pthread_t thread;
        stream->gets_on = !pthread_create(&thread, NULL, get_on, stream);
        if (stream->gets_on) pthread_detach(thread);
    }
    if (task->impatient) pthread_cond_broadcast(&stream->changed);
    return task->seq;
}

bool sim_has_run(const struct sim_stream *stream, uint64_t seq) { return stream->done >= seq; }

static void step(struct sim_stream *stream) {
    struct sim_task *task = stream->head;
    stream->running = true;
    if (task->other) sim_run(task->other, task->other_seq);
    task->start_ns = stream->time_ns > task->issued_ns ? stream->time_ns : task->issued_ns;
    if (task->after && task->after->ns > task->start_ns) task->start_ns = task->after->ns;
    int code = 0;
    if (!stream->error) {
        pthread_mutex_unlock(&sim_lock);
        code = task->run(task);
        pthread_mutex_lock(&sim_lock);
    }
    if (code && !stream->error) stream->error = code;
    stream->time_ns = sim_take_time(task, stream->device);
    stream->head = task->next;
    if (!stream->head) stream->tail = &stream->head;
    stream->done = task->seq;
    stream->running = false;
    task->drop(task);
    pthread_cond_broadcast(&stream->changed);
}

/* Waits until another thread has run a task. The task may be an operator in Python, so this thread releases Python's lock. */
static void wait_for_thread(struct sim_stream *stream) {
    int (*holds)(void) = (int (*)(void))dlsym(RTLD_DEFAULT, "PyGILState_Check");
    void *(*save)(void) = (void *(*)(void))dlsym(RTLD_DEFAULT, "PyEval_SaveThread");
    void (*restore)(void *) = (void (*)(void *))dlsym(RTLD_DEFAULT, "PyEval_RestoreThread");
    void *state = holds && holds() ? save() : NULL;
    pthread_cond_wait(&stream->changed, &sim_lock);
    if (!state) return;
    pthread_mutex_unlock(&sim_lock);
    restore(state);
    pthread_mutex_lock(&sim_lock);
}

int sim_run(struct sim_stream *stream, uint64_t seq) {
    while (stream->done < seq) {
        if (stream->running) wait_for_thread(stream);
        else step(stream);
    }
    return stream->error;
}

void sim_run_one(struct sim_stream *stream) {
    if (stream->head && !stream->running && !stream->head->impatient) step(stream);
}

/* ---- CANN's functions ---- */

static int new_stream(aclrtStream *stream) {
    int device = sim_current_device();
    if (device < 0) return sim_error(ACL_ERROR_RT_CONTEXT_NULL, "no device was set in this thread");
    pthread_mutex_lock(&sim_lock);
    *stream = create(device);
    pthread_mutex_unlock(&sim_lock);
    return 0;
}

aclError aclrtCreateStream(aclrtStream *stream) {
    CALLED("%s", "");
    return new_stream(stream);
}

aclError aclrtCreateStreamWithConfig(aclrtStream *stream, uint32_t priority, uint32_t flags) {
    CALLED("priority=%u flags=0x%x", priority, flags);
    return new_stream(stream);
}

aclError aclrtDestroyStream(aclrtStream stream) {
    CALLED("stream=%p", stream);
    struct sim_stream *queue = stream;
    pthread_mutex_lock(&sim_lock);
    sim_run(queue, queue->queued);
    pthread_mutex_unlock(&sim_lock);
    return 0;
}

aclError aclrtDestroyStreamForce(aclrtStream stream) {
    CALLED("stream=%p", stream);
    struct sim_stream *queue = stream;
    pthread_mutex_lock(&sim_lock);
    while (queue->running) pthread_cond_wait(&queue->changed, &sim_lock);
    while (queue->head) {
        struct sim_task *task = queue->head;
        queue->head = task->next;
        task->drop(task);
    }
    queue->tail = &queue->head;
    queue->done = queue->queued;
    pthread_mutex_unlock(&sim_lock);
    return 0;
}

static int wait_for(struct sim_stream *stream) {
    uint64_t last = stream->queued;
    struct sim_clock reached = {0}; /* excludes work that other threads queue during the wait */
    sim_clock_join(&reached, sim_stream_clock(stream));
    int code = sim_run(stream, last);
    sim_host_has_waited(&reached);
    sim_host_waits_until(stream->time_ns);
    free(reached.steps);
    return code;
}

/* Waits for all queued tasks. Timeouts are ignored: only collectives take time, and they have their own limit. */
static int synchronize(aclrtStream stream) {
    sim_count_sync();
    pthread_mutex_lock(&sim_lock);
    sim_host_calls(SIM_CALL_SYNC);
    struct sim_stream *queue = sim_stream_of(stream);
    int code = sim_refuse_in_capture(ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT, "a wait for a stream");
    if (!code) code = sim_check_device(queue);
    if (!code) code = wait_for(queue);
    pthread_mutex_unlock(&sim_lock);
    return code;
}

aclError aclrtSynchronizeStream(aclrtStream stream) {
    CALLED("stream=%p", stream);
    return synchronize(stream);
}

aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t ms) {
    CALLED("stream=%p ms=%d", stream, ms);
    return synchronize(stream);
}

static int synchronize_device(void) {
    int device = sim_current_device(), first = 0;
    if (device < 0) return sim_error(ACL_ERROR_RT_CONTEXT_NULL, "no device was set in this thread");
    sim_count_sync();
    pthread_mutex_lock(&sim_lock);
    sim_host_calls(SIM_CALL_SYNC);
    first = sim_refuse_in_capture(ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT, "a wait for the device");
    for (struct sim_stream *stream = first ? NULL : streams; stream; stream = stream->next) {
        int code = stream->device == device ? wait_for(stream) : 0;
        if (!first) first = code;
    }
    pthread_mutex_unlock(&sim_lock);
    return first;
}

aclError aclrtSynchronizeDevice(void) {
    CALLED("device=%d", sim_current_device());
    return synchronize_device();
}

aclError aclrtSynchronizeDeviceWithTimeout(int32_t ms) {
    CALLED("device=%d ms=%d", sim_current_device(), ms);
    return synchronize_device();
}

aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus *status) {
    CALLED("stream=%p", stream);
    pthread_mutex_lock(&sim_lock);
    struct sim_stream *queue = sim_stream_of(stream);
    sim_host_calls(SIM_CALL_EVENT);
    int refused = sim_refuse_in_capture(ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT, "a query of a stream");
    if (refused) {
        pthread_mutex_unlock(&sim_lock);
        return refused;
    }
    sim_run_one(queue); /* each query runs one task, so that polling ends */
    bool ready = !queue->head && sim_host_is_past(queue->time_ns);
    *status = ready ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
    if (ready) sim_host_has_waited(sim_stream_clock(queue));
    int code = queue->error;
    pthread_mutex_unlock(&sim_lock);
    return code;
}

aclError aclrtStreamGetId(aclrtStream stream, int32_t *id) {
    CALLED("stream=%p", stream);
    pthread_mutex_lock(&sim_lock);
    *id = sim_stream_of(stream)->id;
    pthread_mutex_unlock(&sim_lock);
    return 0;
}

aclError aclrtGetStreamId(aclrtStream stream, int32_t *id) { return aclrtStreamGetId(stream, id); }

/* Queues a task that reads or writes n bytes, unless this is a race. NULL means no access. sim_lock must be held. */
static int launch(struct sim_stream *queue, struct sim_task *task, void *writes, const void *reads, size_t n) {
    int code = reads ? sim_note_read(queue, reads, n) : 0;
    if (!code && writes) code = sim_note_write(queue, writes, n);
    if (code) {
        task->drop(task);
        return code;
    }
    sim_queue(queue, task);
    return queue->error;
}

static int launch_on(aclrtStream stream, struct sim_task *task, enum sim_call call, void *writes, const void *reads, size_t n) {
    pthread_mutex_lock(&sim_lock);
    sim_host_calls(call);
    int code = launch(sim_stream_of(stream), task, writes, reads, n);
    pthread_mutex_unlock(&sim_lock);
    return code;
}

static int check_stream(aclrtStream stream) {
    pthread_mutex_lock(&sim_lock);
    int code = sim_check_device(sim_stream_of(stream));
    pthread_mutex_unlock(&sim_lock);
    return code;
}

/* ---- tasks ---- */

#define COPY_ALIGNMENT 64 /* of addresses, as CANN's documents of aclrtMemcpyAsync require */

struct copy {
    struct sim_task task;
    void *dst;
    const void *src;
    size_t n;
    enum sim_kind dst_kind, src_kind;
    char owned[]; /* the source bytes of sim_enqueue_write */
};

static int run_copy(struct sim_task *task) {
    struct copy *copy = (struct copy *)task;
    return sim_move(copy->dst, copy->dst_kind, copy->src, copy->src_kind, copy->n);
}

static struct copy *new_copy(void *dst, const void *src, size_t n, bool owned) {
    struct copy *copy = sim_new_task(sizeof *copy + (owned ? n : 0), run_copy, free_task);
    copy->dst = dst;
    copy->src = owned ? memcpy(copy->owned, src, n) : src;
    copy->n = n;
    copy->dst_kind = sim_kind_of(dst, n);
    copy->src_kind = sim_kind_of(copy->src, n);
    return copy;
}

static int queue_copy(void *dst, size_t room, const void *src, size_t n, aclrtMemcpyKind kind, aclrtStream stream) {
    int code = check_stream(stream);
    if (!code) code = sim_check_copy(dst, room, src, n, kind);
    pthread_mutex_lock(&sim_lock);
    bool pageable = sim_range_of(src, n).kind == SIM_FREE || sim_range_of(dst, n).kind == SIM_FREE;
    if (!code && pageable && sim_graph_of(sim_stream_of(stream)))
        code = sim_refuse_in_capture(ACL_ERROR_RT_CAPTURE_MODE_BLOCK_ASYNC, "a copy from or to pageable memory");
    pthread_mutex_unlock(&sim_lock);
    bool buffered = kind == ACL_MEMCPY_HOST_TO_BUF_TO_DEVICE;
    if (!code && !buffered && ((uintptr_t)dst % COPY_ALIGNMENT || (uintptr_t)src % COPY_ALIGNMENT))
        code = sim_error(ACL_ERROR_RT_PARAM_INVALID, "a copy from %p to %p: the addresses are not aligned to %d bytes", src, dst,
                         COPY_ALIGNMENT);
    if (code || !n) return code;
    sim_count_copy(kind, false);
    struct sim_task *task = &new_copy(dst, src, n, buffered)->task;
    task->cost_ns = sim_bus_ns(n);
    code = launch_on(stream, task, SIM_CALL_COPY, dst, src, n);
    if (code || !pageable || buffered) return code;
    sim_count(SIM_PAGEABLE_COPIES);
    return synchronize(stream);
}

aclError aclrtMemcpyAsync(void *dst, size_t room, const void *src, size_t n, aclrtMemcpyKind kind, aclrtStream stream) {
    CALLED("dst=%p src=%p n=%zu kind=%d stream=%p", dst, src, n, (int)kind, stream);
    return queue_copy(dst, room, src, n, kind, stream);
}

/* torch_npu uses this function with drivers that know which memory is registered. */
aclError aclrtMemcpyAsyncWithCondition(void *dst, size_t room, const void *src, size_t n, aclrtMemcpyKind kind,
                                       aclrtStream stream) {
    CALLED("dst=%p src=%p n=%zu kind=%d stream=%p", dst, src, n, (int)kind, stream);
    return queue_copy(dst, room, src, n, kind, stream);
}

struct fill {
    struct sim_task task;
    void *p;
    int value;
    size_t n;
    enum sim_kind kind;
};

static int run_fill(struct sim_task *task) {
    struct fill *fill = (struct fill *)task;
    if (sim_kind_of(fill->p, fill->n) != fill->kind)
        return sim_error(ACL_ERROR_RT_SYS_DMA, "%zu bytes at %p were freed before they were set", fill->n, fill->p);
    if (fill->value) memset(fill->p, fill->value, fill->n);
    else sim_zero(fill->p, fill->n);
    return 0;
}

static struct fill *new_fill(void *p, int value, size_t n) {
    struct fill *fill = sim_new_task(sizeof *fill, run_fill, free_task);
    fill->p = p;
    fill->value = value;
    fill->n = n;
    fill->kind = sim_kind_of(p, n);
    return fill;
}

aclError aclrtMemsetAsync(void *p, size_t room, int32_t value, size_t n, aclrtStream stream) {
    CALLED("p=%p value=%d n=%zu stream=%p", p, value, n, stream);
    if (n > room) return sim_error(ACL_ERROR_RT_PARAM_INVALID, "%zu bytes of %zu", n, room);
    int code = check_stream(stream);
    if (code) return code;
    sim_count(SIM_LAUNCHES);
    return launch_on(stream, &new_fill(p, value, n)->task, SIM_CALL_LAUNCH, p, NULL, n);
}

struct host_call {
    struct sim_task task;
    void (*function)(void *);
    void *argument;
};

static int run_host_call(struct sim_task *task) {
    struct host_call *call = (struct host_call *)task;
    call->function(call->argument);
    return 0;
}

static int launch_host_call(aclrtStream stream, void (*function)(void *), void *argument) {
    int code = check_stream(stream);
    if (code) return code;
    struct host_call *call = sim_new_task(sizeof *call, run_host_call, free_task);
    call->function = function;
    call->argument = argument;
    call->task.impatient = true; /* the host may wait for this call without synchronizing */
    return launch_on(stream, &call->task, SIM_CALL_EVENT, NULL, NULL, 0);
}

aclError aclrtLaunchHostFunc(aclrtStream stream, aclrtHostFunc function, void *argument) {
    CALLED("stream=%p", stream);
    return launch_host_call(stream, function, argument);
}

aclError aclrtLaunchCallback(aclrtCallback function, void *argument, aclrtCallbackBlockType block, aclrtStream stream) {
    CALLED("stream=%p block=%d", stream, (int)block);
    return launch_host_call(stream, function, argument);
}

/* Runs all tasks of a device, and returns the virtual time at which it has finished them. This does not move the host's clock. */
SIM_EXPORT uint64_t sim_device_ns(int device) {
    uint64_t end = 0;
    pthread_mutex_lock(&sim_lock);
    for (struct sim_stream *stream = streams; stream; stream = stream->next) {
        if (stream->device != device) continue;
        sim_run(stream, stream->queued);
        if (stream->time_ns > end) end = stream->time_ns;
    }
    pthread_mutex_unlock(&sim_lock);
    return end;
}

/* ---- for operators in Python, which compute on the host: these calls do not count as synchronizations ---- */

SIM_EXPORT int sim_drain(void *stream) {
    sim_work();
    pthread_mutex_lock(&sim_lock);
    struct sim_stream *queue = sim_stream_of(stream);
    int code = queue->graph || queue->update ? 0 : sim_run(queue, queue->queued);
    pthread_mutex_unlock(&sim_lock);
    return code;
}

/* Fills dst with 0xFF and queues the write, under one lock, because another thread may drain the stream. */
SIM_EXPORT int sim_enqueue_write(void *stream, void *dst, const void *src, size_t n) {
    struct sim_task *task = &new_copy(dst, src, n, true)->task;
    pthread_mutex_lock(&sim_lock);
    int code = launch(sim_stream_of(stream), task, dst, NULL, n);
    if (!code) memset(dst, 0xFF, n);
    pthread_mutex_unlock(&sim_lock);
    return code;
}

/* Does the same for zeros. */
SIM_EXPORT int sim_enqueue_zeros(void *stream, void *p, size_t n) {
    struct sim_task *task = &new_fill(p, 0, n)->task;
    pthread_mutex_lock(&sim_lock);
    int code = launch(sim_stream_of(stream), task, p, NULL, n);
    if (!code) sim_poison(p, n);
    pthread_mutex_unlock(&sim_lock);
    return code;
}

struct pieces {
    struct sim_task task;
    char *start;
    size_t reach, count, size; /* bytes from `start` to the end; number of pieces, and bytes of each */
    int64_t *offsets;
    char *bytes;
};

static int run_pieces(struct sim_task *task) {
    struct pieces *pieces = (struct pieces *)task;
    if (sim_kind_of(pieces->start, pieces->reach) != SIM_DEVICE)
        return sim_error(ACL_ERROR_RT_SYS_DMA, "%zu bytes at %p were freed before they were written", pieces->reach, (void *)pieces->start);
    for (size_t i = 0; i < pieces->count; i++)
        memcpy(pieces->start + pieces->offsets[i], pieces->bytes + i * pieces->size, pieces->size);
    return 0;
}

static void drop_pieces(struct sim_task *task) {
    free(((struct pieces *)task)->offsets);
    free(((struct pieces *)task)->bytes);
    free(task);
}

/* Does the same for pieces of the range [start, start + reach), which are at `offsets`. */
SIM_EXPORT int sim_enqueue_pieces(void *stream, char *start, size_t reach, const int64_t *offsets, size_t count, size_t size,
                                  const void *bytes) {
    struct pieces *pieces = sim_new_task(sizeof *pieces, run_pieces, drop_pieces);
    *pieces = (struct pieces){pieces->task, start, reach, count, size, malloc(count * sizeof *offsets), malloc(count * size)};
    if (!pieces->offsets || !pieces->bytes) abort();
    memcpy(pieces->offsets, offsets, count * sizeof *offsets);
    memcpy(pieces->bytes, bytes, count * size);
    pthread_mutex_lock(&sim_lock);
    int code = launch(sim_stream_of(stream), &pieces->task, start, NULL, reach);
    for (size_t i = 0; !code && i < count; i++) memset(start + offsets[i], 0xFF, size);
    pthread_mutex_unlock(&sim_lock);
    return code;
}
