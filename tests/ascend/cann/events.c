/* Events: the last place in a stream at which an event was recorded, and the time when the stream reached that place. */
#include "sim.h"

#include <stdlib.h>

struct sim_event {
    atomic_int references; /* one for the creator, and one for each record that has not run */
    struct sim_stream *stream; /* NULL before the first record */
    uint64_t seq;
    uint64_t reached_ns; /* on the wall; 0 until the stream reaches the event */
    struct sim_moment *moment; /* virtual time of the last record, or NULL before the first record */
    struct sim_clock clock; /* the stream's clock at the record */
    struct sim_graph *graph; /* the graph in which it was recorded, or NULL */
    uint64_t captured;       /* number of captured tasks of the stream at the record */
};

static void let_go(struct sim_event *event) {
    if (atomic_fetch_sub(&event->references, 1) > 1) return;
    free(event->clock.steps);
    sim_drop_moment(event->moment);
    free(event);
}

static int create(aclrtEvent *event) {
    struct sim_event *created = calloc(1, sizeof *created);
    if (!created) abort();
    atomic_store(&created->references, 1);
    *event = created;
    return 0;
}

aclError aclrtCreateEvent(aclrtEvent *event) {
    CALLED("%s", "");
    return create(event);
}

aclError aclrtCreateEventWithFlag(aclrtEvent *event, uint32_t flags) {
    CALLED("flags=0x%x", flags);
    return create(event);
}

aclError aclrtCreateEventExWithFlag(aclrtEvent *event, uint32_t flags) {
    CALLED("flags=0x%x", flags);
    return create(event);
}

aclError aclrtDestroyEvent(aclrtEvent event) {
    CALLED("event=%p", event);
    let_go(event);
    return 0;
}

struct record {
    struct sim_task task;
    struct sim_event *event;
    struct sim_moment *moment;
};

static int run_record(struct sim_task *task) {
    struct sim_event *event = ((struct record *)task)->event;
    pthread_mutex_lock(&sim_lock);
    ((struct record *)task)->moment->ns = task->start_ns;
    if (event->seq == task->seq) event->reached_ns = sim_now_ns(); /* otherwise a later record has replaced this one */
    pthread_mutex_unlock(&sim_lock);
    return 0;
}

static void drop_record(struct sim_task *task) {
    let_go(((struct record *)task)->event);
    sim_drop_moment(((struct record *)task)->moment);
    free(task);
}

aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream) {
    CALLED("event=%p stream=%p", event, stream);
    struct sim_event *place = event;
    pthread_mutex_lock(&sim_lock);
    struct sim_stream *queue = sim_stream_of(stream);
    int code = sim_check_device(queue);
    if (code) {
        pthread_mutex_unlock(&sim_lock);
        return code;
    }
    place->graph = sim_graph_of(queue);
    if (place->graph) {
        place->stream = queue;
        place->captured = sim_captured(queue);
        pthread_mutex_unlock(&sim_lock);
        return 0;
    }
    struct record *record = sim_new_task(sizeof *record, run_record, drop_record);
    record->event = place;
    atomic_fetch_add(&place->references, 1);
    place->stream = queue;
    place->reached_ns = 0;
    sim_drop_moment(place->moment);
    place->moment = sim_new_moment();
    record->moment = sim_keep_moment(place->moment);
    sim_host_calls(SIM_CALL_EVENT);
    place->seq = sim_queue(place->stream, &record->task);
    free(place->clock.steps);
    place->clock = (struct sim_clock){0};
    sim_clock_join(&place->clock, sim_stream_clock(place->stream));
    pthread_mutex_unlock(&sim_lock);
    return 0;
}

aclError aclrtResetEvent(aclrtEvent event, aclrtStream stream) {
    CALLED("event=%p stream=%p", event, stream);
    return 0;
}

static int run_wait(struct sim_task *task) {
    (void)task;
    return 0;
}

static void drop_wait(struct sim_task *task) {
    sim_drop_moment(task->after);
    free(task);
}

/* Makes a stream wait for work of the same capture, which includes the stream in the capture. */
static int wait_in_capture(struct sim_event *event, struct sim_stream *waiter) {
    if (!event->stream) return 0;
    if (!event->graph || sim_graph_of(event->stream) != event->graph)
        return sim_refuse_in_capture(ACL_ERROR_RT_CAPTURE_DEPENDENCY, "a wait for an event that the capture has not recorded");
    sim_join_capture(waiter, event->graph);
    sim_note_joined(event->stream, event->captured);
    return 0;
}

aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event) {
    CALLED("stream=%p event=%p", stream, event);
    struct sim_event *place = event;
    pthread_mutex_lock(&sim_lock);
    struct sim_stream *waiter = sim_stream_of(stream);
    sim_host_calls(SIM_CALL_EVENT);
    if (place->graph || sim_graph_of(waiter)) {
        int code = wait_in_capture(place, waiter);
        pthread_mutex_unlock(&sim_lock);
        return code;
    }
    if (place->stream && place->stream != waiter) {
        struct sim_task *task = sim_new_task(sizeof *task, run_wait, drop_wait);
        task->other = place->stream;
        task->other_seq = place->seq;
        task->after = sim_keep_moment(place->moment);
        sim_queue(waiter, task);
        sim_clock_join(sim_stream_clock(waiter), &place->clock);
    }
    pthread_mutex_unlock(&sim_lock);
    return 0;
}

static int synchronize(struct sim_event *event) {
    sim_count_sync();
    pthread_mutex_lock(&sim_lock);
    sim_host_calls(SIM_CALL_SYNC);
    struct sim_moment *moment = sim_keep_moment(event->moment); /* another thread may record the event during the wait */
    int code = sim_refuse_in_capture(ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT, "a wait for an event");
    if (!code && event->stream) code = sim_run(event->stream, event->seq);
    sim_host_has_waited(&event->clock);
    if (moment) sim_host_waits_until(moment->ns);
    sim_drop_moment(moment);
    pthread_mutex_unlock(&sim_lock);
    return code;
}

aclError aclrtSynchronizeEvent(aclrtEvent event) {
    CALLED("event=%p", event);
    return synchronize(event);
}

aclError aclrtSynchronizeEventWithTimeout(aclrtEvent event, int32_t ms) {
    CALLED("event=%p ms=%d", event, ms);
    return synchronize(event);
}

/* Sets whether the stream has reached the event. If not, runs one task, so that polling ends. */
static int is_reached(struct sim_event *event, bool *reached) {
    pthread_mutex_lock(&sim_lock);
    int code = sim_refuse_in_capture(ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT, "a query of an event");
    if (code) {
        pthread_mutex_unlock(&sim_lock);
        return code;
    }
    sim_host_calls(SIM_CALL_EVENT);
    if (event->stream && !sim_has_run(event->stream, event->seq)) sim_run_one(event->stream);
    *reached = !event->stream || (sim_has_run(event->stream, event->seq) && sim_host_is_past(event->moment->ns));
    if (*reached) sim_host_has_waited(&event->clock);
    pthread_mutex_unlock(&sim_lock);
    return 0;
}

aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus *status) {
    CALLED("event=%p", event);
    bool reached = false;
    int code = is_reached(event, &reached);
    *status = reached ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
    return code;
}

aclError aclrtQueryEventWaitStatus(aclrtEvent event, aclrtEventWaitStatus *status) {
    CALLED("event=%p", event);
    bool reached = false;
    int code = is_reached(event, &reached);
    *status = reached ? ACL_EVENT_WAIT_STATUS_COMPLETE : ACL_EVENT_WAIT_STATUS_NOT_READY;
    return code;
}

aclError aclrtEventElapsedTime(float *ms, aclrtEvent start, aclrtEvent stop) {
    CALLED("start=%p stop=%p", start, stop);
    struct sim_event *first = start, *second = stop;
    pthread_mutex_lock(&sim_lock);
    uint64_t from = first->reached_ns, to = second->reached_ns;
    pthread_mutex_unlock(&sim_lock);
    if (!from || !to) return sim_error(ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID, "an event was not recorded, or not reached");
    if (from > to) return sim_error(ACL_ERROR_RT_EVENT_TIMESTAMP_REVERSAL, "the first event was reached last");
    *ms = (float)(to - from) / 1e6f;
    return 0;
}

aclError aclrtEventGetTimestamp(aclrtEvent event, uint64_t *microseconds) {
    CALLED("event=%p", event);
    struct sim_event *place = event;
    *microseconds = place->reached_ns / 1000;
    return place->reached_ns ? 0 : sim_error(ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID, "the event was not reached");
}
