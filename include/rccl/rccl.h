/* What AMD's library has beyond NVIDIA's, for programs that link a Strata under RCCL's name, librccl.so.1:
 * only that one has these functions. Made from src/interface/functions.rs. Streams are nccl.h's.
 */
#ifndef RCCL_H_
#define RCCL_H_

#include "../nccl.h"

/* A program that has been loaded. */
typedef int mscclAlgoHandle_t;

#ifdef __cplusplus
extern "C" {
#endif

/* ---- RCCL: making communicators ---- */

/* ncclCommInitRank for several ranks on a device, which tell each other by numbers of their own. Since RCCL 2.12.10. */
ncclResult_t ncclCommInitRankMulti(ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank,
    int virtualId);

/* ---- RCCL: collectives ---- */

/* Every rank gets its block of every rank's vector; the blocks differ in size. On a communicator of Strata's it is strataAllToAllV. Since RCCL. */
ncclResult_t ncclAlltoAllv(const void* sendbuff, const size_t* sendcounts, const size_t* sdispls,
    void* recvbuff, const size_t* recvcounts, const size_t* rdispls, ncclDataType_t datatype, ncclComm_t comm,
    cudaStream_t stream);

/* ncclAlltoAllv under its older name. Since RCCL. */
ncclResult_t ncclAllToAllv(const void* sendbuff, const size_t* sendcounts, const size_t* sdispls,
    void* recvbuff, const size_t* recvcounts, const size_t* rdispls, ncclDataType_t datatype, ncclComm_t comm,
    cudaStream_t stream);

/* ncclAlltoAll under its older name. Since RCCL. */
ncclResult_t ncclAllToAll(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
    ncclComm_t comm, cudaStream_t stream);

/* Every rank gets the reduction of all vectors and of a bias. Since RCCL 2.28.3. */
ncclResult_t ncclAllReduceWithBias(const void* sendbuff, void* recvbuff, size_t count,
    ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream, const void* acc);

/* ---- RCCL: programs for collectives ---- */

/* Loads a program in MSCCL's XML and proves it. Each rank loads the same file; what is wrong with it is ncclGetLastError's text. Since RCCL. */
ncclResult_t mscclLoadAlgo(const char* mscclAlgoFilePath, int* mscclAlgoHandle, int rank);

/* Runs a program: the collective it says, on count elements of a block. Counts and displacements are null. Since RCCL. */
ncclResult_t mscclRunAlgo(const void* sendBuff, const size_t* sendCounts, const size_t* sDisPls,
    void* recvBuff, const size_t* recvCounts, const size_t* rDisPls, size_t count, ncclDataType_t dataType,
    int root, int peer, ncclRedOp_t op, int mscclAlgoHandle, ncclComm_t comm, cudaStream_t stream);

/* Forgets a program. Since RCCL. */
ncclResult_t mscclUnloadAlgo(int mscclAlgoHandle);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* RCCL_H_ */
