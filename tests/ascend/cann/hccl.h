/* Types of HCCL, and internal interfaces of the simulated HCCL. HCCL's own header can only be used in C++. */
#pragma once
#include "sim.h"

typedef int HcclResult;
typedef void *HcclComm;
typedef int HcclReduceOp;
typedef int HcclDataType;
enum {
    HCCL_SUCCESS = 0,
    HCCL_E_PARA = 1,
    HCCL_E_PTR = 2,
    HCCL_E_MEMORY = 3,
    HCCL_E_NOT_SUPPORT = 5,
    HCCL_E_TIMEOUT = 9,
    HCCL_E_TCP_CONNECT = 11,
    HCCL_E_RUNTIME = 15,
    HCCL_E_REMOTE = 21,
};
enum { HCCL_REDUCE_SUM, HCCL_REDUCE_PROD, HCCL_REDUCE_MAX, HCCL_REDUCE_MIN };
enum {
    HCCL_INT8 = 0,
    HCCL_INT16 = 1,
    HCCL_INT32 = 2,
    HCCL_FP16 = 3,
    HCCL_FP32 = 4,
    HCCL_INT64 = 5,
    HCCL_UINT64 = 6,
    HCCL_UINT8 = 7,
    HCCL_UINT16 = 8,
    HCCL_UINT32 = 9,
    HCCL_FP64 = 10,
    HCCL_BFP16 = 11,
};
typedef struct {
    char internal[4108];
} HcclRootInfo;
typedef struct {
    int type; /* 0: send, 1: receive */
    void *buffer;
    uint64_t count;
    HcclDataType data_type;
    uint32_t remote;
} HcclSendRecvItem;

#define MAX_RANKS SIM_MAX_DEVICES
#define SLOT_BYTES ((size_t)1 << 20)    /* largest part of a buffer that a rank shares at a time */
#define PARCEL_BYTES ((size_t)64 << 10) /* largest part of a message to one rank at a time */

/* The collective that a rank is about to run. It must be the same on all ranks. */
struct statement {
    uint64_t number, count;
    int32_t operation, data_type, reduction, root;
};

struct parcel {
    atomic_uint full;
    uint32_t size;
};

/* Memory that the ranks of a communicator share. It has no name, so no file remains if a process is killed. */
struct region {
    atomic_uint attached; /* number of ranks */
    atomic_uint arrived;  /* number of ranks at the current barrier */
    atomic_uint meetings;
    atomic_uint failed; /* the first error, which all ranks return */
    struct statement statements[MAX_RANKS];
    uint64_t ready_ns[MAX_RANKS]; /* virtual time at which each rank reaches the collective */
    struct parcel parcels[MAX_RANKS][MAX_RANKS]; /* [from][to] */
    char slots[MAX_RANKS][SLOT_BYTES];
    char parcel_bytes[MAX_RANKS][MAX_RANKS][PARCEL_BYTES];
};

struct communicator {
    atomic_int references; /* one for the owner, and one for each collective that has not run */
    struct region *region;
    uint32_t ranks, rank;
    uint64_t operations;
    char name[128];
};

/* hccl_region.c */
int hccl_new_region(HcclRootInfo *info);
struct region *hccl_attach(const HcclRootInfo *info, uint32_t ranks, int *error);
void hccl_detach(struct region *region);
/* Waits until all ranks have called this function. Returns HCCL_E_TIMEOUT after HCCL_EXEC_TIMEOUT seconds, or another
 * rank's error. */
int hccl_meet(struct communicator *communicator);
int hccl_fail(struct region *region, int error);
uint64_t hccl_deadline_ns(const char *setting, long fallback_seconds);

/* hccl_reduce.c */
size_t hccl_size(HcclDataType type); /* in bytes, or 0 for an unknown type */
bool hccl_reduces(HcclDataType type, HcclReduceOp op);
/* Sets target[i] = target[i] op source[i]. Each result is rounded to `type`, as on the device. */
void hccl_reduce(void *target, const void *source, size_t count, HcclDataType type, HcclReduceOp op);
