/* HCCL: communicators, and collectives, which are tasks of streams. */
#include "hccl.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum operation { ALL_REDUCE, REDUCE, ALL_GATHER, BROADCAST, REDUCE_SCATTER, SCATTER, ALL_TO_ALL, BARRIER };

/* ---- communicators ---- */

static int connect_ranks(uint32_t ranks, const HcclRootInfo *info, uint32_t rank, HcclComm *comm) {
    if (!info || !comm) return sim_error(HCCL_E_PTR, "a pointer is null");
    if (!ranks || ranks > MAX_RANKS || rank >= ranks)
        return sim_error(HCCL_E_PARA, "rank %u of %u: from 1 to %d ranks are wanted", rank, ranks, MAX_RANKS);
    if (sim_current_device() < 0) return sim_error(HCCL_E_RUNTIME, "no device was set in this thread");
    int error = 0;
    struct region *region = hccl_attach(info, ranks, &error);
    if (!region) return error;
    static atomic_int number;
    struct communicator *communicator = calloc(1, sizeof *communicator);
    if (!communicator) abort();
    atomic_store(&communicator->references, 1);
    communicator->region = region;
    communicator->ranks = ranks;
    communicator->rank = rank;
    snprintf(communicator->name, sizeof communicator->name, "sim_%d", atomic_fetch_add(&number, 1));
    *comm = communicator;
    return 0;
}

static void let_go(struct communicator *communicator) {
    if (atomic_fetch_sub(&communicator->references, 1) > 1) return;
    hccl_detach(communicator->region);
    free(communicator);
}

HcclResult HcclGetRootInfo(HcclRootInfo *info) {
    CALLED("%s", "");
    return hccl_new_region(info);
}

HcclResult HcclCommInitRootInfo(uint32_t ranks, const HcclRootInfo *info, uint32_t rank, HcclComm *comm) {
    CALLED("ranks=%u rank=%u", ranks, rank);
    return connect_ranks(ranks, info, rank, comm);
}

HcclResult HcclCommInitRootInfoConfig(uint32_t ranks, const HcclRootInfo *info, uint32_t rank, const void *config,
                                      HcclComm *comm) {
    CALLED("ranks=%u rank=%u config=%p", ranks, rank, config);
    return connect_ranks(ranks, info, rank, comm);
}

HcclResult HcclCommDestroy(HcclComm comm) {
    CALLED("comm=%p", comm);
    let_go(comm);
    return 0;
}

HcclResult HcclGetCommName(HcclComm comm, char *name) {
    CALLED("comm=%p", comm);
    memcpy(name, ((struct communicator *)comm)->name, sizeof((struct communicator *)comm)->name);
    return 0;
}

HcclResult HcclGetRankSize(HcclComm comm, uint32_t *ranks) {
    CALLED("comm=%p", comm);
    *ranks = ((struct communicator *)comm)->ranks;
    return 0;
}

HcclResult HcclGetRankId(HcclComm comm, uint32_t *rank) {
    CALLED("comm=%p", comm);
    *rank = ((struct communicator *)comm)->rank;
    return 0;
}

HcclResult HcclGetCommAsyncError(HcclComm comm, HcclResult *error) {
    CALLED("comm=%p", comm);
    *error = (HcclResult)atomic_load(&((struct communicator *)comm)->region->failed);
    return 0;
}

HcclResult HcclSetConfig(int config, int32_t value) {
    CALLED("config=%d value=%d", config, value);
    return 0;
}

uint32_t HcclGetCommConfigCapability(void) { return 0; } /* the simulated communicator has no options */

const char *HcclGetErrorString(HcclResult code) {
    return code == HCCL_SUCCESS ? "no error" : code == HCCL_E_TIMEOUT ? "timeout" : "error";
}

/* ---- collectives ---- */

struct collective {
    struct sim_task task;
    struct communicator *communicator;
    struct statement statement;
    const char *send;
    char *receive;
    size_t sent, received; /* bytes */
    size_t unit;           /* bytes of an element */
};

/* Converts an error of HCCL to the code that synchronizing the stream returns. */
static int as_acl(int error) {
    return error == HCCL_E_TIMEOUT ? ACL_ERROR_RT_FFTS_PLUS_TIMEOUT : error ? ACL_ERROR_RT_SUSPECT_REMOTE_ERROR : 0;
}

static int agree(struct collective *collective) {
    struct communicator *communicator = collective->communicator;
    struct statement *statements = communicator->region->statements;
    collective->statement.number = communicator->operations++; /* counted when it runs, because a graph may be discarded */
    statements[communicator->rank] = collective->statement;
    communicator->region->ready_ns[communicator->rank] = collective->task.start_ns;
    int error = hccl_meet(communicator);
    for (uint32_t rank = 0; !error && rank < communicator->ranks; rank++) /* the collective starts when all ranks are ready */
        if (communicator->region->ready_ns[rank] > collective->task.start_ns)
            collective->task.start_ns = communicator->region->ready_ns[rank];
    for (uint32_t rank = 0; !error && rank < communicator->ranks; rank++)
        if (memcmp(&statements[rank], &collective->statement, sizeof *statements))
            error = hccl_fail(communicator->region,
                              sim_error(HCCL_E_PARA, "EI0005: ranks %u and %u differ: operation %d and %d, count %llu and %llu",
                                        communicator->rank, rank, collective->statement.operation, statements[rank].operation,
                                        (unsigned long long)collective->statement.count,
                                        (unsigned long long)statements[rank].count));
    return error ? error : hccl_meet(communicator);
}

/* Copies this rank's part of the slots. The slots contain `bytes` bytes from offset `at` of each rank's block `block`. */
static void take(struct collective *collective, uint32_t block, size_t at, size_t bytes) {
    struct communicator *communicator = collective->communicator;
    char (*slots)[SLOT_BYTES] = communicator->region->slots;
    struct statement *statement = &collective->statement;
    size_t whole = statement->count * collective->unit;
    bool mine = block == communicator->rank, root = (uint32_t)statement->root == communicator->rank;
    char *target = collective->receive + at;
    switch (statement->operation) {
    case BROADCAST:
        if (!root) memcpy(target, slots[statement->root], bytes);
        break;
    case SCATTER:
        if (mine) memcpy(target, slots[statement->root], bytes);
        break;
    case ALL_TO_ALL:
        if (!mine) break; /* fall through */
    case ALL_GATHER:
        for (uint32_t rank = 0; rank < communicator->ranks; rank++) memcpy(target + rank * whole, slots[rank], bytes);
        break;
    default: /* reductions run in the order of the ranks, so that all ranks get identical bits */
        if ((statement->operation == REDUCE && !root) || (statement->operation == REDUCE_SCATTER && !mine)) break;
        memcpy(target, slots[0], bytes);
        for (uint32_t rank = 1; rank < communicator->ranks; rank++)
            hccl_reduce(target, slots[rank], bytes / collective->unit, statement->data_type, statement->reduction);
    }
}

static int go_through(struct collective *collective) {
    struct communicator *communicator = collective->communicator;
    int operation = collective->statement.operation, error = agree(collective);
    bool by_rank = operation == REDUCE_SCATTER || operation == SCATTER || operation == ALL_TO_ALL;
    bool from_root = operation == BROADCAST || operation == SCATTER;
    bool shows = !from_root || (uint32_t)collective->statement.root == communicator->rank;
    size_t whole = collective->statement.count * collective->unit;
    for (uint32_t block = 0; block < (by_rank ? communicator->ranks : 1); block++) {
        for (size_t at = 0; !error && at < whole; at += SLOT_BYTES) {
            size_t bytes = whole - at < SLOT_BYTES ? whole - at : SLOT_BYTES;
            if (shows) memcpy(communicator->region->slots[communicator->rank], collective->send + block * whole + at, bytes);
            error = hccl_meet(communicator);
            if (error) break;
            take(collective, block, at, bytes);
            error = hccl_meet(communicator);
        }
    }
    return error;
}

static int run_collective(struct sim_task *task) {
    struct collective *collective = (struct collective *)task;
    if ((collective->sent && sim_kind_of(collective->send, collective->sent) != SIM_DEVICE) ||
        (collective->received && sim_kind_of(collective->receive, collective->received) != SIM_DEVICE))
        return sim_error(ACL_ERROR_RT_SYS_DMA, "a buffer of a collective is no device memory, or was freed before it ran");
    return as_acl(go_through(collective));
}

static void drop_collective(struct sim_task *task) {
    let_go(((struct collective *)task)->communicator);
    free(task);
}

/* Queues a collective. `send` has `sends` * count elements, and `receive` has `receives` * count elements. */
static int queue(enum operation operation, void *send, uint64_t sends, void *receive, uint64_t receives, uint64_t count,
                 HcclDataType type, HcclReduceOp reduction, uint32_t root, HcclComm comm, aclrtStream stream) {
    struct communicator *communicator = comm;
    bool reduces = operation == ALL_REDUCE || operation == REDUCE || operation == REDUCE_SCATTER;
    if (!comm) return sim_error(HCCL_E_PTR, "no communicator");
    if (!hccl_size(type) || (reduces && !hccl_reduces(type, reduction)))
        return sim_error(HCCL_E_NOT_SUPPORT, "operation %d, data type %d, reduction %d", (int)operation, type, reduction);
    if (root >= communicator->ranks) return sim_error(HCCL_E_PARA, "root %u of %u ranks", root, communicator->ranks);
    struct collective *collective = sim_new_task(sizeof *collective, run_collective, drop_collective);
    collective->task.impatient = collective->task.busy = true;
    collective->communicator = communicator;
    collective->send = send;
    collective->receive = receive;
    collective->unit = hccl_size(type);
    collective->sent = sends * count * collective->unit;
    collective->received = receives * count * collective->unit;
    atomic_fetch_add(&communicator->references, 1);
    pthread_mutex_lock(&sim_lock);
    collective->statement = (struct statement){0, count, (int)operation, type, reduction, (int)root};
    struct sim_stream *on = sim_stream_of(stream);
    collective->task.cost_ns = sim_link_ns(collective->received);
    sim_host_calls(SIM_CALL_LAUNCH);
    int refused = sim_check_device(on);
    if (!refused) refused = sim_note_read(on, send, collective->sent);
    if (!refused) refused = sim_note_write(on, receive, collective->received);
    if (refused) drop_collective(&collective->task);
    else sim_queue(on, &collective->task), sim_count(SIM_LAUNCHES);
    pthread_mutex_unlock(&sim_lock);
    return refused ? HCCL_E_RUNTIME : 0;
}

#define RANKS(comm) ((comm) ? ((struct communicator *)(comm))->ranks : 0)
#define IS_ROOT(comm, root) ((comm) && ((struct communicator *)(comm))->rank == (root))

HcclResult HcclAllReduce(void *send, void *receive, uint64_t count, HcclDataType type, HcclReduceOp op, HcclComm comm,
                         aclrtStream stream) {
    CALLED("count=%llu type=%d op=%d stream=%p", (unsigned long long)count, type, op, stream);
    return queue(ALL_REDUCE, send, 1, receive, 1, count, type, op, 0, comm, stream);
}

HcclResult HcclReduce(void *send, void *receive, uint64_t count, HcclDataType type, HcclReduceOp op, uint32_t root,
                      HcclComm comm, aclrtStream stream) {
    CALLED("count=%llu type=%d op=%d root=%u stream=%p", (unsigned long long)count, type, op, root, stream);
    return queue(REDUCE, send, 1, receive, IS_ROOT(comm, root), count, type, op, root, comm, stream);
}

HcclResult HcclAllGather(void *send, void *receive, uint64_t count, HcclDataType type, HcclComm comm, aclrtStream stream) {
    CALLED("count=%llu type=%d stream=%p", (unsigned long long)count, type, stream);
    return queue(ALL_GATHER, send, 1, receive, RANKS(comm), count, type, 0, 0, comm, stream);
}

HcclResult HcclBroadcast(void *buffer, uint64_t count, HcclDataType type, uint32_t root, HcclComm comm, aclrtStream stream) {
    CALLED("count=%llu type=%d root=%u stream=%p", (unsigned long long)count, type, root, stream);
    return queue(BROADCAST, buffer, 1, buffer, 1, count, type, 0, root, comm, stream);
}

HcclResult HcclReduceScatter(void *send, void *receive, uint64_t count, HcclDataType type, HcclReduceOp op, HcclComm comm,
                             aclrtStream stream) {
    CALLED("count=%llu type=%d op=%d stream=%p", (unsigned long long)count, type, op, stream);
    return queue(REDUCE_SCATTER, send, RANKS(comm), receive, 1, count, type, op, 0, comm, stream);
}

HcclResult HcclScatter(void *send, void *receive, uint64_t count, HcclDataType type, uint32_t root, HcclComm comm,
                       aclrtStream stream) {
    CALLED("count=%llu type=%d root=%u stream=%p", (unsigned long long)count, type, root, stream);
    return queue(SCATTER, send, IS_ROOT(comm, root) ? RANKS(comm) : 0, receive, 1, count, type, 0, root, comm, stream);
}

HcclResult HcclAlltoAll(const void *send, uint64_t send_count, HcclDataType send_type, const void *receive,
                        uint64_t receive_count, HcclDataType receive_type, HcclComm comm, aclrtStream stream) {
    CALLED("count=%llu type=%d stream=%p", (unsigned long long)send_count, send_type, stream);
    if (send_count != receive_count || send_type != receive_type)
        return sim_error(HCCL_E_PARA, "what is sent and what is received differ");
    uint32_t ranks = RANKS(comm);
    return queue(ALL_TO_ALL, (void *)send, ranks, (void *)receive, ranks, send_count, send_type, 0, 0, comm, stream);
}

HcclResult HcclBarrier(HcclComm comm, aclrtStream stream) {
    CALLED("stream=%p", stream);
    return queue(BARRIER, NULL, 0, NULL, 0, 0, HCCL_INT8, 0, 0, comm, stream);
}

/* ---- point-to-point messages ---- */

struct exchange {
    struct sim_task task;
    struct communicator *communicator;
    uint32_t items;
    struct {
        bool sends;
        char *bytes;
        size_t left;
        uint32_t remote;
    } item[];
};

/* Sends the next parcel of an item if there is room for it, or receives the next parcel if it has arrived. */
static bool pass(struct exchange *exchange, uint32_t number) {
    struct region *region = exchange->communicator->region;
    uint32_t here = exchange->communicator->rank, there = exchange->item[number].remote;
    uint32_t from = exchange->item[number].sends ? here : there, to = exchange->item[number].sends ? there : here;
    struct parcel *parcel = &region->parcels[from][to];
    size_t left = exchange->item[number].left, bytes;
    if (exchange->item[number].sends) {
        if (atomic_load(&parcel->full)) return false;
        bytes = left < PARCEL_BYTES ? left : PARCEL_BYTES;
        memcpy(region->parcel_bytes[from][to], exchange->item[number].bytes, bytes);
        parcel->size = (uint32_t)bytes;
        atomic_store(&parcel->full, 1);
    } else {
        if (!atomic_load(&parcel->full)) return false;
        bytes = parcel->size;
        if (bytes > left) return hccl_fail(region, sim_error(HCCL_E_PARA, "rank %u sends more than is received", from));
        memcpy(exchange->item[number].bytes, region->parcel_bytes[from][to], bytes);
        atomic_store(&parcel->full, 0);
    }
    exchange->item[number].bytes += bytes;
    exchange->item[number].left -= bytes;
    return true;
}

static int run_exchange(struct sim_task *task) {
    struct exchange *exchange = (struct exchange *)task;
    struct region *region = exchange->communicator->region;
    for (uint32_t i = 0; i < exchange->items; i++)
        if (exchange->item[i].left && sim_kind_of(exchange->item[i].bytes, exchange->item[i].left) != SIM_DEVICE)
            return sim_error(ACL_ERROR_RT_SYS_DMA, "what is sent or received is no device memory, or was freed");
    uint64_t deadline = hccl_deadline_ns("HCCL_EXEC_TIMEOUT", 1836);
    for (bool unfinished = true; unfinished;) {
        bool moved = unfinished = false;
        for (uint32_t i = 0; i < exchange->items; i++) {
            if (!exchange->item[i].left) continue;
            unfinished = true;
            bool waits = false; /* whether an earlier item between the same two ranks must be transferred first */
            for (uint32_t j = 0; j < i; j++)
                waits |= exchange->item[j].left && exchange->item[j].sends == exchange->item[i].sends &&
                         exchange->item[j].remote == exchange->item[i].remote;
            if (!waits) moved |= pass(exchange, i);
        }
        if (atomic_load(&region->failed)) return as_acl((int)atomic_load(&region->failed));
        if (moved || !unfinished) continue;
        if (sim_now_ns() > deadline)
            return as_acl(hccl_fail(region, sim_error(HCCL_E_TIMEOUT, "EI0002: nobody has sent or received for HCCL_EXEC_TIMEOUT")));
        nanosleep(&(struct timespec){0, 100000}, NULL);
    }
    return 0;
}

static void drop_exchange(struct sim_task *task) {
    let_go(((struct exchange *)task)->communicator);
    free(task);
}

static int queue_exchange(const HcclSendRecvItem *items, uint32_t count, HcclComm comm, aclrtStream stream) {
    struct exchange *exchange = sim_new_task(sizeof *exchange + count * sizeof exchange->item[0], run_exchange, drop_exchange);
    exchange->task.impatient = true;
    exchange->communicator = comm;
    exchange->items = count;
    for (uint32_t i = 0; i < count; i++) {
        exchange->item[i].sends = items[i].type == 0;
        exchange->item[i].bytes = items[i].buffer;
        exchange->item[i].left = items[i].count * hccl_size(items[i].data_type);
        exchange->item[i].remote = items[i].remote;
        if (items[i].remote < RANKS(comm) && hccl_size(items[i].data_type)) continue;
        free(exchange);
        return sim_error(HCCL_E_PARA, "rank %u, data type %d", items[i].remote, items[i].data_type);
    }
    atomic_fetch_add(&exchange->communicator->references, 1);
    pthread_mutex_lock(&sim_lock);
    struct sim_stream *on = sim_stream_of(stream);
    int refused = sim_check_device(on);
    for (uint32_t i = 0; i < count && !refused; i++)
        refused = exchange->item[i].sends ? sim_note_read(on, exchange->item[i].bytes, exchange->item[i].left)
                                          : sim_note_write(on, exchange->item[i].bytes, exchange->item[i].left);
    if (refused) drop_exchange(&exchange->task);
    else sim_queue(on, &exchange->task), sim_count(SIM_LAUNCHES);
    pthread_mutex_unlock(&sim_lock);
    return refused ? HCCL_E_RUNTIME : 0;
}

HcclResult HcclSend(void *buffer, uint64_t count, HcclDataType type, uint32_t remote, HcclComm comm, aclrtStream stream) {
    CALLED("count=%llu type=%d to=%u stream=%p", (unsigned long long)count, type, remote, stream);
    return queue_exchange(&(HcclSendRecvItem){0, buffer, count, type, remote}, 1, comm, stream);
}

HcclResult HcclRecv(void *buffer, uint64_t count, HcclDataType type, uint32_t remote, HcclComm comm, aclrtStream stream) {
    CALLED("count=%llu type=%d from=%u stream=%p", (unsigned long long)count, type, remote, stream);
    return queue_exchange(&(HcclSendRecvItem){1, buffer, count, type, remote}, 1, comm, stream);
}

HcclResult HcclBatchSendRecv(HcclSendRecvItem *items, uint32_t count, HcclComm comm, aclrtStream stream) {
    CALLED("items=%u stream=%p", count, stream);
    return queue_exchange(items, count, comm, stream);
}
