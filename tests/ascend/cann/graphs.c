/* Graphs: captured tasks, which run when the graph is launched. A captured stream collects its tasks in a graph instead of
 * running them. A launch runs the same tasks on the same addresses. A task group contains the tasks whose host arguments an
 * update may change. */
#include "sim.h"

#include <stdlib.h>

struct access {
    const void *p;
    size_t n;
    bool writes;
};

struct sim_group {
    struct sim_graph *graph;
    struct call **calls; /* of the group's operators */
    size_t count;
    long updates;
    size_t updated; /* number of operators that the current update has replaced */
    struct sim_group *next;
};

struct sim_graph {
    struct sim_stream *origin; /* NULL after the capture */
    pthread_t owner;
    aclmdlRICaptureMode mode;
    int error; /* the first error of the capture */
    struct sim_task *head, **tail;
    struct access *accesses;
    size_t access_count, access_space;
    struct sim_group *groups, *open; /* `open` is the group that the capture adds operators to */
    long launches;
    int stream;         /* of the last launch */
    uint64_t last_step, step_before; /* steps of the last two launches in that stream */
    int references;     /* one for the creator, and one for each queued launch */
};

/* An operator in Python. */
struct call {
    struct sim_task task;
    long number;
};

static struct sim_graph *capturing; /* torch_npu allows a single capture at a time */
static _Thread_local aclmdlRICaptureMode thread_mode = ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;
static int (*run_in_python)(long number);
static long *dropped; /* numbers of calls that will not run again */
static size_t dropped_count, dropped_space;

SIM_EXPORT void sim_set_calls(int (*run)(long)) { run_in_python = run; }

static void drop_number(long number) {
    if (dropped_count == dropped_space) {
        dropped_space = dropped_space ? 2 * dropped_space : 64;
        dropped = realloc(dropped, dropped_space * sizeof *dropped);
        if (!dropped) abort();
    }
    dropped[dropped_count++] = number;
}

/* Returns the number of a call that Python can forget, or -1. Python asks, because a thread with sim_lock must not wait for
 * Python's lock. */
SIM_EXPORT long sim_dropped_call(void) {
    pthread_mutex_lock(&sim_lock);
    long number = dropped_count ? dropped[--dropped_count] : -1;
    pthread_mutex_unlock(&sim_lock);
    return number;
}

static int run_call(struct sim_task *task) { return run_in_python(((struct call *)task)->number); }

static void drop_call(struct sim_task *task) {
    drop_number(((struct call *)task)->number);
    free(task);
}

static void release(struct sim_graph *graph) {
    if (--graph->references) return;
    while (graph->head) {
        struct sim_task *task = graph->head;
        graph->head = task->next;
        task->drop(task);
    }
    while (graph->groups) {
        struct sim_group *group = graph->groups;
        graph->groups = group->next;
        free(group->calls);
        free(group);
    }
    free(graph->accesses);
    free(graph);
}

/* ---- for the other files; sim_lock must be held ---- */

void sim_capture(struct sim_graph *graph, struct sim_task *task) {
    *graph->tail = task;
    graph->tail = &task->next;
}

void sim_capture_access(struct sim_graph *graph, const void *p, size_t n, bool writes) {
    if (graph->access_count == graph->access_space) {
        graph->access_space = graph->access_space ? 2 * graph->access_space : 64;
        graph->accesses = realloc(graph->accesses, graph->access_space * sizeof *graph->accesses);
        if (!graph->accesses) abort();
    }
    graph->accesses[graph->access_count++] = (struct access){p, n, writes};
}

int sim_refuse_in_capture(int code, const char *what) {
    if (!capturing || thread_mode == ACL_MODEL_RI_CAPTURE_MODE_RELAXED) return 0;
    bool own = pthread_equal(capturing->owner, pthread_self());
    if (capturing->mode == ACL_MODEL_RI_CAPTURE_MODE_RELAXED) return 0;
    if (!own && capturing->mode == ACL_MODEL_RI_CAPTURE_MODE_THREAD_LOCAL) return 0;
    if (!capturing->error) capturing->error = ACL_ERROR_RT_STREAM_CAPTURE_INVALIDATED;
    return sim_error(code, "%s is not permitted during a capture", what);
}

/* ---- capture ---- */

aclError aclmdlRICaptureBegin(aclrtStream stream, aclmdlRICaptureMode mode) {
    CALLED("stream=%p mode=%d", stream, (int)mode);
    pthread_mutex_lock(&sim_lock);
    struct sim_stream *origin = sim_stream_of(stream);
    int code = sim_check_device(origin);
    if (!code && sim_is_default(origin)) code = sim_error(ACL_ERROR_RT_STREAM_CAPTURE_IMPLICIT, "the default stream cannot be captured");
    if (!code && capturing) code = sim_error(ACL_ERROR_STREAM_CAPTURE_CONFLICT, "another capture is in progress");
    if (!code) {
        struct sim_graph *graph = calloc(1, sizeof *graph);
        if (!graph) abort();
        graph->origin = origin;
        graph->owner = pthread_self();
        graph->mode = mode;
        graph->tail = &graph->head;
        graph->references = 1;
        capturing = graph;
        sim_join_capture(origin, graph);
    }
    pthread_mutex_unlock(&sim_lock);
    return code;
}

aclError aclmdlRICaptureGetInfo(aclrtStream stream, aclmdlRICaptureStatus *status, aclmdlRI *model) {
    CALLED("stream=%p", stream);
    pthread_mutex_lock(&sim_lock);
    struct sim_graph *graph = sim_graph_of(sim_stream_of(stream));
    *status = !graph         ? ACL_MODEL_RI_CAPTURE_STATUS_NONE
              : graph->error ? ACL_MODEL_RI_CAPTURE_STATUS_INVALIDATED
                             : ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE;
    *model = graph;
    pthread_mutex_unlock(&sim_lock);
    return 0;
}

aclError aclmdlRICaptureEnd(aclrtStream stream, aclmdlRI *model) {
    CALLED("stream=%p", stream);
    pthread_mutex_lock(&sim_lock);
    struct sim_stream *origin = sim_stream_of(stream);
    struct sim_graph *graph = sim_graph_of(origin);
    int code = 0;
    if (!graph || graph->origin != origin) code = sim_error(ACL_ERROR_RT_STREAM_CAPTURE_UNMATCHED, "the capture did not begin in this stream");
    if (!code) {
        bool unjoined = sim_leave_capture(graph, origin);
        capturing = NULL;
        graph->origin = NULL;
        if (graph->error) code = sim_error(graph->error, "the capture was invalidated");
        else if (graph->open) code = sim_error(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "a task group was not ended");
        else if (unjoined) code = sim_error(ACL_ERROR_RT_STREAM_UNJOINED, "a stream of the capture was not joined with the first stream");
        *model = graph;
    }
    pthread_mutex_unlock(&sim_lock);
    return code;
}

aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode *mode) {
    CALLED("mode=%d", (int)*mode);
    aclmdlRICaptureMode before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    return 0;
}

aclError aclmdlRIDestroy(aclmdlRI model) {
    CALLED("model=%p", model);
    pthread_mutex_lock(&sim_lock);
    release(model);
    pthread_mutex_unlock(&sim_lock);
    return 0;
}

/* Returns 1 if the stream is captured, 2 if it updates a task group, or else 0. */
SIM_EXPORT int sim_capture_mode(aclrtStream stream) {
    pthread_mutex_lock(&sim_lock);
    struct sim_stream *queue = sim_stream_of(stream);
    int mode = sim_graph_of(queue) ? 1 : sim_update_of(queue) ? 2 : 0;
    pthread_mutex_unlock(&sim_lock);
    return mode;
}

/* Returns whether a captured task writes the memory at p. */
SIM_EXPORT bool sim_captured_write(aclrtStream stream, const char *p) {
    bool found = false;
    pthread_mutex_lock(&sim_lock);
    struct sim_graph *graph = sim_graph_of(sim_stream_of(stream));
    for (size_t i = 0; i < graph->access_count && !found; i++) {
        const char *start = graph->accesses[i].p;
        found = graph->accesses[i].writes && start <= p && p < start + graph->accesses[i].n;
    }
    pthread_mutex_unlock(&sim_lock);
    return found;
}

/* Captures the operator with this number. */
SIM_EXPORT void sim_capture_call(aclrtStream stream, long number) {
    struct call *call = sim_new_task(sizeof *call, run_call, drop_call);
    call->number = number;
    pthread_mutex_lock(&sim_lock);
    struct sim_stream *queue = sim_stream_of(stream);
    struct sim_group *group = sim_graph_of(queue)->open;
    if (group) {
        group->calls = realloc(group->calls, (group->count + 1) * sizeof *group->calls);
        if (!group->calls) abort();
        group->calls[group->count++] = call;
    }
    sim_queue(queue, &call->task);
    pthread_mutex_unlock(&sim_lock);
}

/* ---- launch ---- */

static int check_accesses(struct sim_graph *graph) {
    for (size_t i = 0; i < graph->access_count; i++)
        if (sim_range_of(graph->accesses[i].p, graph->accesses[i].n).kind == SIM_FREE)
            return sim_error(ACL_ERROR_RT_SYS_DMA, "the graph uses %zu bytes at %p, which were freed", graph->accesses[i].n,
                             graph->accesses[i].p);
    return 0;
}

struct launch {
    struct sim_task task;
    struct sim_graph *graph;
};

static int run_launch(struct sim_task *task) {
    struct sim_graph *graph = ((struct launch *)task)->graph;
    pthread_mutex_lock(&sim_lock);
    int code = check_accesses(graph);
    pthread_mutex_unlock(&sim_lock);
    task->busy = true;
    for (struct sim_task *one = graph->head; one && !code; one = one->next) {
        one->start_ns = task->start_ns + task->cost_ns;
        code = one->run(one);
        task->cost_ns = one->start_ns + one->cost_ns - task->start_ns;
    }
    return code;
}

static void drop_launch(struct sim_task *task) {
    release(((struct launch *)task)->graph);
    free(task);
}

aclError aclmdlRIExecuteAsync(aclmdlRI model, aclrtStream stream) {
    CALLED("model=%p stream=%p", model, stream);
    struct sim_graph *graph = model;
    struct launch *launch = sim_new_task(sizeof *launch, run_launch, drop_launch);
    launch->graph = graph;
    for (struct sim_task *task = graph->head; task; task = task->next) launch->task.impatient |= task->impatient;
    pthread_mutex_lock(&sim_lock);
    graph->references++;
    struct sim_stream *queue = sim_stream_of(stream);
    int code = sim_check_device(queue);
    if (!code && graph->origin) code = sim_error(ACL_ERROR_RT_MODEL_CAPTURED, "the capture has not ended");
    if (!code) code = check_accesses(graph);
    for (size_t i = 0; i < graph->access_count && !code; i++) {
        struct access *access = &graph->accesses[i];
        code = access->writes ? sim_note_write(queue, (void *)access->p, access->n) : sim_note_read(queue, access->p, access->n);
    }
    if (code) {
        drop_launch(&launch->task);
    } else {
        sim_count(SIM_LAUNCHES);
        sim_host_calls(SIM_CALL_LAUNCH);
        graph->launches++;
        graph->stream = sim_stream_id(queue);
        graph->step_before = graph->last_step;
        graph->last_step = sim_step(queue);
        sim_queue(queue, &launch->task);
    }
    pthread_mutex_unlock(&sim_lock);
    return code;
}

/* ---- task groups and updates ---- */

aclError aclmdlRICaptureTaskGrpBegin(aclrtStream stream) {
    CALLED("stream=%p", stream);
    pthread_mutex_lock(&sim_lock);
    struct sim_graph *graph = sim_graph_of(sim_stream_of(stream));
    int code = 0;
    if (!graph) code = sim_error(ACL_ERROR_RT_STREAM_NOT_CAPTURED, "the stream is not captured");
    else if (graph->open) code = sim_error(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "another task group has not ended");
    if (!code) {
        struct sim_group *group = calloc(1, sizeof *group);
        if (!group) abort();
        *group = (struct sim_group){.graph = graph, .next = graph->groups};
        graph->groups = graph->open = group;
    }
    pthread_mutex_unlock(&sim_lock);
    return code;
}

aclError aclmdlRICaptureTaskGrpEnd(aclrtStream stream, aclrtTaskGrp *handle) {
    CALLED("stream=%p", stream);
    pthread_mutex_lock(&sim_lock);
    struct sim_graph *graph = sim_graph_of(sim_stream_of(stream));
    int code = graph && graph->open ? 0 : sim_error(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "no task group has begun");
    if (!code) {
        *handle = graph->open;
        graph->open = NULL;
    }
    pthread_mutex_unlock(&sim_lock);
    return code;
}

/* Checks that an update does not reach a launch that may still run. The launch that waits for this update may run. */
static int check_update(struct sim_stream *stream, const struct sim_group *group) {
    const struct sim_graph *graph = group->graph;
    if (!graph->launches) return 0;
    uint64_t step = graph->launches > group->updates ? graph->step_before : graph->last_step;
    if (sim_clock_of(sim_stream_clock(stream), graph->stream) >= step) return 0;
    return sim_error(ACL_ERROR_STREAM_TASK_GROUP_INTR, "the update has not waited for an earlier launch of the graph, which may still run");
}

aclError aclmdlRICaptureTaskUpdateBegin(aclrtStream stream, aclrtTaskGrp handle) {
    CALLED("stream=%p handle=%p", stream, handle);
    struct sim_group *group = handle;
    pthread_mutex_lock(&sim_lock);
    struct sim_stream *queue = sim_stream_of(stream);
    sim_host_calls(SIM_CALL_LAUNCH);
    int code = sim_update_of(queue) ? sim_error(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "another update has not ended") : check_update(queue, group);
    if (!code) {
        group->updated = 0;
        sim_set_update(queue, group);
    }
    pthread_mutex_unlock(&sim_lock);
    return code;
}

aclError aclmdlRICaptureTaskUpdateEnd(aclrtStream stream) {
    CALLED("stream=%p", stream);
    pthread_mutex_lock(&sim_lock);
    struct sim_stream *queue = sim_stream_of(stream);
    struct sim_group *group = sim_update_of(queue);
    int code = group ? 0 : sim_error(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "no update has begun");
    if (!code && group->updated != group->count)
        code = sim_error(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "the update has %zu operators, and the group has %zu", group->updated, group->count);
    if (group) group->updates++;
    sim_set_update(queue, NULL);
    pthread_mutex_unlock(&sim_lock);
    return code;
}

struct replacement {
    struct sim_task task;
    struct sim_group *group;
    size_t index;
    long number;
};

static int run_replacement(struct sim_task *task) {
    struct replacement *replacement = (struct replacement *)task;
    struct call *call = replacement->group->calls[replacement->index];
    pthread_mutex_lock(&sim_lock);
    drop_number(call->number);
    call->number = replacement->number;
    pthread_mutex_unlock(&sim_lock);
    return 0;
}

static void drop_replacement(struct sim_task *task) {
    release(((struct replacement *)task)->group->graph);
    free(task);
}

/* Queues the replacement of the group's next operator. Returns an error if the group has no more operators. */
SIM_EXPORT int sim_update_call(aclrtStream stream, long number) {
    pthread_mutex_lock(&sim_lock);
    struct sim_stream *queue = sim_stream_of(stream);
    struct sim_group *group = sim_update_of(queue);
    int code = group->updated < group->count ? 0 : sim_error(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "the task group has only %zu operators", group->count);
    if (!code) {
        struct replacement *replacement = sim_new_task(sizeof *replacement, run_replacement, drop_replacement);
        replacement->group = group;
        replacement->index = group->updated++;
        replacement->number = number;
        group->graph->references++;
        sim_queue(queue, &replacement->task);
    }
    pthread_mutex_unlock(&sim_lock);
    return code;
}
