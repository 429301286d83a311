/* What Strata has beyond NCCL: communicators and streams of the host. Made from src/interface/functions.rs.
 * A strataStream_t is passed where NCCL takes a cudaStream_t. With a null stream a call (or an
 * outermost group) has ended when it returns.
 */
#ifndef STRATA_H_
#define STRATA_H_

#include "nccl.h"

typedef cudaStream_t strataStream_t;
typedef struct strataEvent* strataEvent_t;
typedef void (*strataCallback_t)(void* argument);
typedef void (*strataStatusCallback_t)(void* argument, ncclResult_t status);

/* Types and operations that NCCL does not have, for communicators in host memory. Operations on bits are for
 * integers. NCCL, and Strata where data is on a GPU, return ncclInvalidArgument. */
#define strataInt16 ((ncclDataType_t)0x5354000c)
#define strataUint16 ((ncclDataType_t)0x5354000d)
#define strataBitAnd ((ncclRedOp_t)0x53540105)
#define strataBitOr ((ncclRedOp_t)0x53540106)
#define strataBitXor ((ncclRedOp_t)0x53540107)

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Communicators of the host ---- */

/* Makes an id for strataCommInitHost, without NCCL. That function takes an id of ncclGetUniqueId as well, unless NCCL_COMM_ID is set in a process in which NCCL serves. Since strata. */
ncclResult_t strataGetUniqueId(ncclUniqueId* uniqueId);

/* This process's rank among those that a launcher has started, their number, and an id for a communicator of them all, which process 0 makes. All processes call. The launcher's variables count: those of torchrun and strata launch, else of MPI's launchers, else of srun; with none of them the process is rank 0 of 1. Since strata. */
ncclResult_t strataGetWorldId(ncclUniqueId* uniqueId, int* nranks, int* rank);

/* Makes a communicator on the host, whatever vendor library or driver the process has mapped. All ranks call. What NCCL's functions make of it is on the host, too. timeout_ms limits its making and each operation: 0 sets no limit, and a negative one leaves the defaults. It always waits, NCCL_COMM_BLOCKING or not. Rank 0's limit counts. Sends and receives on it wait for no collective, no other peer and no message the other way; messages from one rank to another keep the order of the calls. On one stream a receive goes on beside sends and receives before it that do not use its memory, and a send beside sends; everything else waits for what is before it, as a send does for a receive. On the null stream a send may wait for its receive. Since strata. */
ncclResult_t strataCommInitHost(ncclComm_t* comm, int nranks, ncclUniqueId id, int rank, int timeout_ms);

/* The text of this thread's last call that failed in Strata, also where NCCL answers ncclGetLastError(NULL); on a thread without one that of the process's last error, and in a callback of strataStreamAddCallbackStatus that of its status. The thread's next call of this function writes its own in the same place. Since strata. */
const char* strataGetLastError(void);

/* ---- Collectives of blocks of different sizes ---- */

/* Every rank gets every rank's block. For each rank counts has its elements, and displs where they begin in recvbuff; they lie one after another where displs is null. All ranks have the same counts. In place where sendbuff is the rank's block of recvbuff. What lies between blocks is not touched. This function and those below work on NCCL's and RCCL's communicators as well. Since strata. */
ncclResult_t strataAllGatherV(const void* sendbuff, void* recvbuff, const size_t* counts,
    const size_t* displs, ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream);

/* Rank i gets block i of the reduction of all vectors. For each rank counts has its elements, and displs where they begin in sendbuff. All ranks have the same counts. In place where recvbuff is the rank's block of sendbuff. Since strata. */
ncclResult_t strataReduceScatterV(const void* sendbuff, void* recvbuff, const size_t* counts,
    const size_t* displs, ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream);

/* Every rank gets its block of every rank's vector. What rank i has for rank j is what j expects of i. Since strata. */
ncclResult_t strataAllToAllV(const void* sendbuff, const size_t* sendcounts, const size_t* sdispls,
    void* recvbuff, const size_t* recvcounts, const size_t* rdispls, ncclDataType_t datatype, ncclComm_t comm,
    cudaStream_t stream);

/* The root gets every rank's block. recvcounts and displs are the root's alone. In place where the root's sendbuff is its block of recvbuff. Since strata. */
ncclResult_t strataGatherV(const void* sendbuff, size_t sendcount, void* recvbuff, const size_t* recvcounts,
    const size_t* displs, ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream);

/* Every rank gets its block of the root's vector. sendcounts and displs are the root's alone. In place where the root's recvbuff is its block of sendbuff. Since strata. */
ncclResult_t strataScatterV(const void* sendbuff, const size_t* sendcounts, const size_t* displs,
    void* recvbuff, size_t recvcount, ncclDataType_t datatype, int root, ncclComm_t comm,
    cudaStream_t stream);

/* ncclAllReduce whose messages between nodes are coded: code is "bf16", "mx8" or "int8" (docs/codes.md), datatype a float that it makes smaller. Where residual is not null it has count float32, zeros at first, which the program leaves alone between calls: what coding leaves out of a sum is added to the next one. All ranks give a residual or none. On a communicator of NCCL or RCCL on several nodes Strata's own transports have to carry what goes between them (STRATA_INTER); else it is ncclInvalidUsage. Since strata. */
ncclResult_t strataAllReduceCoded(const void* sendbuff, void* recvbuff, void* residual, size_t count,
    ncclDataType_t datatype, ncclRedOp_t op, const char* code, ncclComm_t comm, cudaStream_t stream);

/* The same of ncclReduceScatter; the residual has as many elements as sendbuff. Since strata. */
ncclResult_t strataReduceScatterCoded(const void* sendbuff, void* recvbuff, void* residual, size_t recvcount,
    ncclDataType_t datatype, ncclRedOp_t op, const char* code, ncclComm_t comm, cudaStream_t stream);

/* strataAllGatherV with options, as ncclAllGatherConfig has them. On a communicator of another library algSelection may not be forced. All ranks give the same options. Since strata. */
ncclResult_t strataAllGatherVConfig(const void* sendbuff, void* recvbuff, const size_t* counts,
    const size_t* displs, ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream,
    const ncclCollConfig_t* config);

/* strataReduceScatterV with options. Since strata. */
ncclResult_t strataReduceScatterVConfig(const void* sendbuff, void* recvbuff, const size_t* counts,
    const size_t* displs, ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream,
    const ncclCollConfig_t* config);

/* strataAllToAllV with options. Since strata. */
ncclResult_t strataAllToAllVConfig(const void* sendbuff, const size_t* sendcounts, const size_t* sdispls,
    void* recvbuff, const size_t* recvcounts, const size_t* rdispls, ncclDataType_t datatype, ncclComm_t comm,
    cudaStream_t stream, const ncclCollConfig_t* config);

/* strataGatherV with options. Since strata. */
ncclResult_t strataGatherVConfig(const void* sendbuff, size_t sendcount, void* recvbuff,
    const size_t* recvcounts, const size_t* displs, ncclDataType_t datatype, int root, ncclComm_t comm,
    cudaStream_t stream, const ncclCollConfig_t* config);

/* strataScatterV with options. Since strata. */
ncclResult_t strataScatterVConfig(const void* sendbuff, const size_t* sendcounts, const size_t* displs,
    void* recvbuff, size_t recvcount, ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream,
    const ncclCollConfig_t* config);

/* ---- Tuning ---- */

/* Writes what a tuning table says of the machine that a communicator is on: an object in JSON, with a zero byte after it. ncclInvalidArgument if it takes more than so many bytes (1024 will do). Since strata. */
ncclResult_t strataCommDescribe(ncclComm_t comm, void* text, size_t bytes);

/* ---- Ranks that are lost ---- */

/* Writes who takes part in the communicator's calls and how far they are: an object in JSON, with a zero byte after it. ranks and members are numbers of ranks as they were when it was made, generation counts how often ranks were lost, first_call is the number of the first collective of this generation, calls of the collectives that have ended (strataCommAdapt takes two, and one more where something has come back), lost has each rank that is lost and why, links what STRATA_MEASURE_EVERY or strataCommProfile knows, goes_on whether lost ranks end nothing, late_calls in how many calls somebody was late. Where STRATA_LOST=continue does not hold calls is null, and where STRATA_LATE=relay does not late_calls; links where neither of the two has been asked for and no rank is lost. links has epoch, how often shares have changed by what was found, and mb_per_s, what each rank's link delivers, null where that is not known or the rank is lost. In front of a vendor's library it tells of calls that Strata carries, ncclInvalidUsage where it carries none. ncclInvalidArgument if it takes more than so many bytes. Since strata. */
ncclResult_t strataCommState(ncclComm_t comm, void* text, size_t bytes);

/* Has a function called when ranks have been lost and the others go on (STRATA_LOST=continue): on every rank that is left, once for each generation, on the thread of the call in which that was found, or of the next one where a rank was in none, and before it ends. It may call strataCommState; other calls on the communicator return ncclInvalidUsage there. Null: none any more. ncclInvalidUsage where lost ranks end the communicator. Since strata. */
ncclResult_t strataCommOnChange(ncclComm_t comm, strataCallback_t callback, void* argument);

/* Says how calls go on without lost ranks (STRATA_LOST=continue) and late ones (STRATA_LATE=relay): options are names with values, commas between them; what is not named is off, and null names nothing. "rescale=on" has floats' sums (ncclSum and operations of ncclRedOpCreatePreMulSum) multiplied by the number of ranks over the number of contributors, so that they are what all would have added on average; sums of integers are ncclInvalidUsage then. "late=drop" ends the all-reduces that late ranks relay without what these have not contributed: the others wait no longer, the late rank's call gives the same result, and averages are over the contributors of each element. "late=bring" has it brought, as ever. All ranks call it, with equal options and in the same place among their collectives; it holds from the next call on. With data on GPUs, and where lost ranks end the communicator, it returns when all that was called before has ended. With STRATA_LOST=continue it also has NICs that are up again be used and, in front of a vendor's library, has that work inside the nodes again. ncclInvalidUsage where ranks ask for different options, where lost ranks end the communicator and late ones are waited for, and for "late=drop" where late ones are waited for, or calls end when all ranks say that they have them (STRATA_LOST=continue), and in front of a vendor's library; ncclInvalidArgument for what is no option. Since strata. */
ncclResult_t strataCommAdapt(ncclComm_t comm, const char* options);

/* ---- Links ---- */

/* Measures the links between the communicator's nodes now, with a MiB or more for each of its NICs, and has all-reduces of a MiB or more share their work by that from then on, until they are measured again (by this, or after every STRATA_MEASURE_EVERY calls). All ranks call it, in the same place among their collectives; it returns when all have the figures, which strataCommState tells as links. Of ranks on one node it does nothing. ncclInvalidUsage on communicators of strataCommInitHost. Since strata. */
ncclResult_t strataCommProfile(ncclComm_t comm);

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

/* The same, and the function gets the first error of what was queued since the last such callback, or ncclSuccess. During the call ncclGetLastError (of a host communicator) gives the error's text. Since strata. */
ncclResult_t strataStreamAddCallbackStatus(cudaStream_t stream, strataStatusCallback_t callback,
    void* argument);

/* Has what is queued on the stream from now on wait until so many bytes from data on are final: in the buffers of collectives, sends and receives that are queued on host streams and have not ended. They may be used and overwritten then, though a collective goes on behind them. With a null stream the caller waits. What belongs to no such operation is final. If one has failed the wait ends with its error. Since strata. */
ncclResult_t strataStreamWaitRange(cudaStream_t stream, const void* data, size_t bytes);

/* How many of so many bytes from data on are final; 0 where it returns an error. Since strata. */
ncclResult_t strataRangeQuery(const void* data, size_t bytes, size_t* finalBytes);

/* ---- Windows ---- */

/* From here to strataWindowEnd the program promises that no collective on this communicator needs the result of another one. They are held back and run as calls of one group, which become fewer calls: when those held back have this many bytes (0: no limit), when the first of them is us microseconds old on rank 0 (0: no limit), and at the end. Bytes of a call are those of its largest buffer on any rank; of blocks whose sizes no rank knows all, none. What is held back is on no stream yet: nothing but strataWindowEnd waits for it, also where stream is null, and its buffers must stay. All ranks call it with equal bounds; with a limit of time they come together in it, as in ncclCommSplit. ncclSend, ncclRecv and what ends the communicator, but for ncclCommAbort, return ncclInvalidUsage until the end. On communicators of another library nothing is held back. Since strata. */
ncclResult_t strataWindowBegin(ncclComm_t comm, size_t bytes, unsigned int us);

/* Launches what is held back. When it returns the calls of the window are as they would be without one: queued on their streams, those on null streams ended. With a limit of time each runs behind what its stream had been given when it was made, and what the streams are given from here on comes after them. In a group it acts at the group's end. Since strata. */
ncclResult_t strataWindowEnd(ncclComm_t comm);

/* ---- Events ---- */

/* Makes an event: a mark in the order of a stream, for which other streams wait. Until it is recorded there is nothing to wait for. Events are for streams of strataStreamCreate; a GPU's streams have its driver's. Since strata. */
ncclResult_t strataEventCreate(strataEvent_t* event);

/* Marks what has been queued on the stream so far. Waits that were called before go by the mark before. Not in an open group, whose operations are queued when it ends. Since strata. */
ncclResult_t strataEventRecord(strataEvent_t event, cudaStream_t stream);

/* Has what is queued on the stream from now on wait until everything before the mark is done. With a null stream the caller waits. If something before the mark has failed, the stream (the call) gets its error and goes on. Since strata. */
ncclResult_t strataEventStreamWait(cudaStream_t stream, strataEvent_t event);

/* ncclInProgress while something before the mark is not done, else ncclSuccess or the first error of its stream then. Since strata. */
ncclResult_t strataEventQuery(strataEvent_t event);

/* Waits until everything before the mark is done; returns the first error of its stream then. Since strata. */
ncclResult_t strataEventSynchronize(strataEvent_t event);

/* Ends an event. What waits for it already still does. Since strata. */
ncclResult_t strataEventDestroy(strataEvent_t event);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* STRATA_H_ */
