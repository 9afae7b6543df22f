/* Race detection, from the last accesses to each range of memory. A conflicting access is an error unless it waits for the
 * earlier accesses. Each stream counts its steps. A clock contains one step of each stream, and work with this clock runs
 * after these steps. Each stream has a clock. An event stores the clock of the stream at its last record. The host has a
 * clock for the work that it has waited for. */
#include "sim.h"

#include <stdlib.h>
#include <string.h>

struct access {
    char *start, *stop;
    int writer, reader; /* streams, or -1 for none */
    uint64_t written, read;
};

static struct access *accesses; /* sorted by address, without overlaps */
static size_t count, space;
static struct sim_clock host;

static bool watching(void) {
    static int answer = -1;
    if (answer < 0) answer = (int)sim_setting("ASCEND_SIM_RACES", 1, 0, 1);
    return answer;
}

uint64_t sim_clock_of(const struct sim_clock *clock, int stream) {
    return (size_t)stream < clock->count ? clock->steps[stream] : 0;
}

void sim_clock_join(struct sim_clock *clock, const struct sim_clock *other) {
    if (clock->count < other->count) {
        clock->steps = realloc(clock->steps, other->count * sizeof *clock->steps);
        if (!clock->steps) abort();
        memset(clock->steps + clock->count, 0, (other->count - clock->count) * sizeof *clock->steps);
        clock->count = other->count;
    }
    for (size_t i = 0; i < other->count; i++)
        if (clock->steps[i] < other->steps[i]) clock->steps[i] = other->steps[i];
}

void sim_clock_set(struct sim_clock *clock, int stream, uint64_t step) {
    struct sim_clock longer = {calloc((size_t)stream + 1, sizeof *longer.steps), (size_t)stream + 1};
    if (!longer.steps) abort();
    longer.steps[stream] = step;
    sim_clock_join(clock, &longer);
    free(longer.steps);
}

void sim_host_has_waited(const struct sim_clock *clock) { sim_clock_join(&host, clock); }

struct sim_clock *sim_host_clock(void) { return &host; }

/* Returns the index of the first access that ends after p. */
static size_t find(const char *p) {
    size_t low = 0, high = count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (accesses[middle].stop > p) high = middle;
        else low = middle + 1;
    }
    return low;
}

static void insert(size_t at, struct access access) {
    if (count == space) {
        space = space ? 2 * space : 256;
        accesses = realloc(accesses, space * sizeof *accesses);
        if (!accesses) abort();
    }
    memmove(accesses + at + 1, accesses + at, (count - at) * sizeof *accesses);
    accesses[at] = access;
    count++;
}

/* Splits the access that contains p at p. */
static void split(char *p) {
    size_t at = find(p);
    if (at == count || accesses[at].start >= p) return;
    struct access first = accesses[at];
    first.stop = p;
    accesses[at].start = p;
    insert(at, first);
}

static void erase(char *start, char *stop) {
    split(start);
    split(stop);
    size_t from = find(start), to = from;
    while (to < count && accesses[to].start < stop) to++;
    memmove(accesses + from, accesses + to, (count - to) * sizeof *accesses);
    count -= to - from;
}

void sim_forget(const void *p, size_t n) { erase((char *)p, (char *)p + n); }

/* Removes accesses that the host has waited for. All later work runs after them, so they cannot be part of a race. */
static void prune(void) {
    static size_t enough = 1024;
    if (count < enough) return;
    size_t kept = 0;
    for (size_t i = 0; i < count; i++) {
        struct access *access = &accesses[i];
        bool written = access->writer < 0 || access->written <= sim_clock_of(&host, access->writer);
        bool read = access->reader < 0 || access->read <= sim_clock_of(&host, access->reader);
        if (!written || !read) accesses[kept++] = *access;
    }
    count = kept;
    enough = kept < 512 ? 1024 : 2 * kept;
}

static int race(const char *what, int stream, const struct access *access, const char *before, int other) {
    return sim_error(ACL_ERROR_RT_STREAM_CONTEXT, "race: stream %d %s %p, and has not waited for stream %d, which %s it", stream,
                     what, (void *)access->start, other, before);
}

/* Checks that work with `clock` runs after all conflicting accesses to the range. `stream` is -1 for the host's clock. */
static int check(const struct sim_clock *clock, int stream, const char *start, const char *stop, bool writes) {
    const char *what = writes ? "writes" : "reads";
    for (size_t at = find(start); at < count && accesses[at].start < stop; at++) {
        struct access *access = &accesses[at];
        if (access->writer >= 0 && access->writer != stream && sim_clock_of(clock, access->writer) < access->written)
            return race(what, stream, access, "wrote", access->writer);
        if (writes && access->reader >= 0 && access->reader != stream && sim_clock_of(clock, access->reader) < access->read)
            return race(what, stream, access, "reads", access->reader);
    }
    return 0;
}

int sim_note_write(struct sim_stream *stream, void *p, size_t n) {
    if (!n) return 0;
    if (sim_graph_of(stream)) {
        sim_capture_access(sim_graph_of(stream), p, n, true);
        return 0;
    }
    if (!watching()) return 0;
    prune();
    char *start = p, *stop = start + n;
    int id = sim_stream_id(stream), code = check(sim_stream_clock(stream), id, start, stop, true);
    if (code) return code;
    erase(start, stop);
    insert(find(start), (struct access){start, stop, id, -1, sim_step(stream), 0});
    return 0;
}

int sim_note_read(struct sim_stream *stream, const void *p, size_t n) {
    if (!n) return 0;
    if (sim_graph_of(stream)) {
        sim_capture_access(sim_graph_of(stream), p, n, false);
        return 0;
    }
    if (!watching()) return 0;
    prune();
    char *start = (char *)p, *stop = start + n;
    int id = sim_stream_id(stream), code = check(sim_stream_clock(stream), id, start, stop, false);
    if (code) return code;
    split(start);
    split(stop);
    uint64_t step = sim_step(stream);
    for (size_t at = find(start); start < stop; at++) { /* only the last reader is stored, which is enough to detect a race */
        if (at == count || accesses[at].start > start) {
            char *end = at == count || accesses[at].start > stop ? stop : accesses[at].start;
            insert(at, (struct access){start, end, -1, id, 0, step});
        } else {
            accesses[at].reader = id;
            accesses[at].read = step;
        }
        start = accesses[at].stop;
    }
    return 0;
}

/* Notes an access by the host, or by a copy that blocks the host. */
int sim_note_host(const void *p, size_t n, bool writes) {
    if (!watching() || !n) return 0;
    int code = check(&host, -1, p, (const char *)p + n, writes);
    if (!code && writes) sim_forget(p, n);
    return code;
}

/* ---- for operators: a launch on the stream reads or writes memory ---- */

SIM_EXPORT int sim_reads(void *stream, const void *p, size_t n) {
    pthread_mutex_lock(&sim_lock);
    int code = sim_note_read(sim_stream_of(stream), p, n);
    pthread_mutex_unlock(&sim_lock);
    return code;
}

SIM_EXPORT int sim_writes(void *stream, void *p, size_t n) {
    pthread_mutex_lock(&sim_lock);
    int code = sim_note_write(sim_stream_of(stream), p, n);
    pthread_mutex_unlock(&sim_lock);
    return code;
}
