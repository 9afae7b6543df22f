/* Operators. Python runs the simulated operators. All operators that are called by name are refused here, because their
 * output would be garbage. */
#include "sim.h"

aclError aclopCompileAndExecute(const char *type, int inputs, const aclTensorDesc *const input_descriptions[],
                                const aclDataBuffer *const input_buffers[], int outputs,
                                const aclTensorDesc *const output_descriptions[], aclDataBuffer *const output_buffers[],
                                const aclopAttr *attributes, aclopEngineType engine, aclopCompileType compile,
                                const char *path, aclrtStream stream) {
    CALLED("type=%s inputs=%d outputs=%d stream=%p", type, inputs, outputs, stream);
    (void)input_descriptions, (void)input_buffers, (void)output_descriptions, (void)output_buffers;
    (void)attributes, (void)engine, (void)compile, (void)path;
    return sim_error(ACL_ERROR_OP_NOT_FOUND, "operator %s is not simulated", type);
}
