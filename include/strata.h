/* What Strata has beyond NCCL: streams on a machine without a GPU. Made from src/interface/functions.rs.
 * A strataStream_t is passed where NCCL takes a cudaStream_t. With a null stream a call (or an
 * outermost group) has ended when it returns.
 */
#ifndef STRATA_H_
#define STRATA_H_

#include "nccl.h"

typedef cudaStream_t strataStream_t;
typedef void (*strataCallback_t)(void* argument);

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Tuning ---- */

/* Writes what a tuning table says of the machine that a communicator is on: an object in JSON, with a zero byte after it. ncclInvalidArgument if it takes more than so many bytes (1024 will do). Since strata. */
ncclResult_t strataCommDescribe(ncclComm_t comm, void* text, size_t bytes);

/* ---- Streams ---- */

/* Makes a stream. Since strata. */
ncclResult_t strataStreamCreate(cudaStream_t* stream);

/* Ends a stream. What is queued on it is still done, in the background. Since strata. */
ncclResult_t strataStreamDestroy(cudaStream_t stream);

/* Waits until everything queued on the stream is done; returns the first error since the last call. Since strata. */
ncclResult_t strataStreamSynchronize(cudaStream_t stream);

/* ncclInProgress while something is queued on the stream, else ncclSuccess or the first error. Since strata. */
ncclResult_t strataStreamQuery(cudaStream_t stream);

/* Queues a call of a function of the program, on the stream's thread. Since strata. */
ncclResult_t strataStreamAddCallback(cudaStream_t stream, strataCallback_t callback, void* argument);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* STRATA_H_ */
