/* Elementwise reductions. */
#include "hccl.h"

#include <string.h>

size_t hccl_size(HcclDataType type) {
    switch (type) {
    case HCCL_INT8:
    case HCCL_UINT8: return 1;
    case HCCL_INT16:
    case HCCL_UINT16:
    case HCCL_FP16:
    case HCCL_BFP16: return 2;
    case HCCL_INT32:
    case HCCL_UINT32:
    case HCCL_FP32: return 4;
    case HCCL_INT64:
    case HCCL_UINT64:
    case HCCL_FP64: return 8;
    default: return 0;
    }
}

/* Returns whether Atlas A2 supports the reduction, according to CANN 8.5's pages about HcclAllReduce and HcclReduce. */
bool hccl_reduces(HcclDataType type, HcclReduceOp op) {
    if (op < HCCL_REDUCE_SUM || op > HCCL_REDUCE_MIN) return false;
    if (op == HCCL_REDUCE_PROD && (type == HCCL_INT16 || type == HCCL_BFP16)) return false;
    return type == HCCL_INT8 || type == HCCL_INT16 || type == HCCL_INT32 || type == HCCL_INT64 || type == HCCL_FP16 ||
           type == HCCL_FP32 || type == HCCL_BFP16;
}

#define COMBINE(a, b) \
    (op == HCCL_REDUCE_SUM ? (a) + (b) : op == HCCL_REDUCE_PROD ? (a) * (b) : op == HCCL_REDUCE_MAX ? ((b) > (a) ? (b) : (a)) \
                                                                                                  : ((b) < (a) ? (b) : (a)))
#define ELEMENTWISE(name, type)                                                               \
    static void name(type *target, const type *source, size_t count, HcclReduceOp op) {       \
        for (size_t i = 0; i < count; i++) target[i] = (type)COMBINE(target[i], source[i]);   \
    }
ELEMENTWISE(reduce_int8, int8_t)
ELEMENTWISE(reduce_int16, int16_t)
ELEMENTWISE(reduce_int32, int32_t)
ELEMENTWISE(reduce_int64, int64_t)
ELEMENTWISE(reduce_fp16, _Float16)
ELEMENTWISE(reduce_fp32, float)

static float widen(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

/* Rounds to the nearest bfloat16, and ties to even. */
static uint16_t narrow(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (value != value) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static void reduce_bfp16(uint16_t *target, const uint16_t *source, size_t count, HcclReduceOp op) {
    for (size_t i = 0; i < count; i++) {
        float a = widen(target[i]), b = widen(source[i]);
        target[i] = narrow(COMBINE(a, b));
    }
}

void hccl_reduce(void *target, const void *source, size_t count, HcclDataType type, HcclReduceOp op) {
    switch (type) {
    case HCCL_INT8: reduce_int8(target, source, count, op); break;
    case HCCL_INT16: reduce_int16(target, source, count, op); break;
    case HCCL_INT32: reduce_int32(target, source, count, op); break;
    case HCCL_INT64: reduce_int64(target, source, count, op); break;
    case HCCL_FP16: reduce_fp16(target, source, count, op); break;
    case HCCL_FP32: reduce_fp32(target, source, count, op); break;
    default: reduce_bfp16(target, source, count, op); break;
    }
}
