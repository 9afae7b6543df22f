/* Counters of work between the host and the device: waits, launches and copies. */
#include "sim.h"

#include <string.h>

static const char *const names[SIM_COUNTERS] = {
    [SIM_SYNCS] = "syncs",
    [SIM_LAUNCHES] = "launches",
    [SIM_HIDDEN_COPIES] = "hidden copies",
    [SIM_AICPU] = "aicpu",
    [SIM_UPLOADS] = "uploads",
    [SIM_DOWNLOADS] = "downloads",
    [SIM_PAGEABLE_COPIES] = "pageable copies",
};
static atomic_long counters[SIM_COUNTERS];

void sim_count(enum sim_counter counter) { atomic_fetch_add(&counters[counter], 1); }

static _Thread_local bool just_synced; /* whether the host has just synchronized, and has queued no work since */

void sim_count_sync(void) {
    sim_count(SIM_SYNCS);
    just_synced = true;
}

void sim_count_copy(aclrtMemcpyKind kind, bool blocks) {
    if (kind == ACL_MEMCPY_HOST_TO_DEVICE || kind == ACL_MEMCPY_HOST_TO_BUF_TO_DEVICE) sim_count(SIM_UPLOADS);
    if (kind == ACL_MEMCPY_DEVICE_TO_DEVICE) sim_count(SIM_LAUNCHES);
    if (kind != ACL_MEMCPY_DEVICE_TO_HOST) return;
    sim_count(SIM_DOWNLOADS);
    if (!blocks) return;
    if (!just_synced) sim_count(SIM_SYNCS);
    just_synced = false;
}

void sim_work(void) { just_synced = false; }

SIM_EXPORT void sim_counts_reset(void) {
    for (int counter = 0; counter < SIM_COUNTERS; counter++) atomic_store(&counters[counter], 0);
}

/* ---- for tests, and for operators in Python ---- */

static int counter_of(const char *name) {
    for (int counter = 0; counter < SIM_COUNTERS; counter++)
        if (!strcmp(names[counter], name)) return counter;
    return -1;
}

/* Returns a counter by its name, or -1 if there is no such counter. */
SIM_EXPORT long sim_counted(const char *name) {
    int counter = counter_of(name);
    return counter < 0 ? -1 : atomic_load(&counters[counter]);
}

SIM_EXPORT void sim_counted_add(const char *name, long count) {
    int counter = counter_of(name);
    if (counter >= 0) atomic_fetch_add(&counters[counter], count);
}

SIM_EXPORT long sim_syncs(void) { return atomic_load(&counters[SIM_SYNCS]); }

SIM_EXPORT void sim_syncs_reset(void) { atomic_store(&counters[SIM_SYNCS], 0); }
