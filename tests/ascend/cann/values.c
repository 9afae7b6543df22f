/* Values in device memory, with which torch_npu implements the events that a graph waits for. */
#include "sim.h"

#include <stdlib.h>
#include <time.h>

struct write {
    const void *p;
    struct sim_stream *stream;
    uint64_t seq;
    struct write *next;
};

static struct write *writes; /* queued writes, oldest first */

/* Returns the oldest queued write to p, or NULL. Forgets the writes that have run. */
static struct write *next_write(const void *p) {
    for (struct write **link = &writes; *link;) {
        struct write *write = *link;
        if (sim_has_run(write->stream, write->seq)) {
            *link = write->next;
            free(write);
        } else if (write->p == p) {
            return write;
        } else {
            link = &write->next;
        }
    }
    return NULL;
}

static void add_write(const void *p, struct sim_stream *stream, uint64_t seq) {
    struct write **link = &writes, *write = malloc(sizeof *write);
    if (!write) abort();
    *write = (struct write){p, stream, seq, NULL};
    while (*link) link = &(*link)->next;
    *link = write;
}

struct value_task {
    struct sim_task task;
    uint64_t *p, value;
};

static int run_write(struct sim_task *task) {
    struct value_task *write = (struct value_task *)task;
    atomic_store((_Atomic uint64_t *)write->p, write->value);
    return 0;
}

/* Runs the stream that will write the value. If there is none, waits for a while and fails, as a watchdog would. */
static int run_wait(struct sim_task *task) {
    struct value_task *wait = (struct value_task *)task;
    uint64_t deadline = sim_now_ns() + 1000000u * (uint64_t)sim_setting("ASCEND_SIM_TIMEOUT_MS", 1000, 1, 600000);
    for (;;) {
        pthread_mutex_lock(&sim_lock);
        struct write *write = next_write(wait->p);
        if (write) sim_run(write->stream, write->seq);
        pthread_mutex_unlock(&sim_lock);
        if (atomic_load((_Atomic uint64_t *)wait->p) == wait->value) return 0;
        if (sim_now_ns() > deadline)
            return sim_error(ACL_ERROR_RT_STREAM_SYNC_TIMEOUT, "a graph has waited too long for the update of a recorded operator");
        nanosleep(&(struct timespec){0, 1000000}, NULL);
    }
}

static void drop_value(struct sim_task *task) { free(task); }

static int queue_value(int (*run)(struct sim_task *), void *p, uint64_t value, aclrtStream stream) {
    struct value_task *task = sim_new_task(sizeof *task, run, drop_value);
    task->p = p;
    task->value = value;
    pthread_mutex_lock(&sim_lock);
    struct sim_stream *queue = sim_stream_of(stream);
    uint64_t seq = sim_queue(queue, &task->task);
    if (run == run_write && !sim_graph_of(queue)) add_write(p, queue, seq);
    pthread_mutex_unlock(&sim_lock);
    return 0;
}

aclError aclrtValueWrite(void *p, uint64_t value, uint32_t flag, aclrtStream stream) {
    CALLED("p=%p value=%llu flag=%u stream=%p", p, (unsigned long long)value, flag, stream);
    return queue_value(run_write, p, value, stream);
}

aclError aclrtValueWait(void *p, uint64_t value, uint32_t flag, aclrtStream stream) {
    CALLED("p=%p value=%llu flag=%u stream=%p", p, (unsigned long long)value, flag, stream);
    return queue_value(run_wait, p, value, stream);
}
