/* Prints sizes, offsets and constants; run once with Strata's header and once with NVIDIA's. */
#include <stddef.h>
#include <nccl.h>
#include <stdio.h>

#define SIZE(type) printf("sizeof(" #type ") = %zu\n", sizeof(type))
#define FIELD(type, field) \
  printf(#type "." #field " at %zu, %zu bytes\n", offsetof(type, field), sizeof(((type*)0)->field))
#define VALUE(name) printf(#name " = %lld\n", (long long)(name))

static void bytes(const char* name, const void* start, size_t size) {
  printf("%s =", name);
  for (size_t i = 0; i < size; i++) printf(" %02x", ((const unsigned char*)start)[i]);
  printf("\n");
}

int main(void) {
  SIZE(ncclComm_t); SIZE(ncclWindow_t); SIZE(ncclUniqueId); SIZE(ncclResult_t); SIZE(ncclDataType_t);
  SIZE(ncclRedOp_t); SIZE(ncclScalarResidence_t); SIZE(ncclConfig_t); SIZE(ncclCollConfig_t);
  SIZE(ncclConfigExt_t); SIZE(ncclSimInfo_t); SIZE(ncclEncryptionConfig_t); SIZE(ncclWaitSignalDesc_t);
  SIZE(ncclParamHandle_t); SIZE(ncclCommMemStat_t); SIZE(ncclHostCftMode_t); SIZE(ncclNvlsHostMode_t);
#define C(field) FIELD(ncclConfig_t, field)
  C(size); C(magic); C(version); C(blocking); C(cgaClusterSize); C(minCTAs); C(maxCTAs); C(netName); C(splitShare);
  C(trafficClass); C(commName); C(collnetEnable); C(CTAPolicy); C(shrinkShare); C(nvlsCTAs); C(nChannelsPerNetPeer);
  C(nvlinkCentricSched); C(graphUsageMode); C(numRmaCtx); C(maxP2pPeers); C(graphStreamOrdering);
  C(launchOrderImplicit); C(numRmaSig); C(rmaEagerInit); C(hostCftMode); C(nvlsHostMode);
#define K(field) FIELD(ncclCollConfig_t, field)
  K(size); K(magic); K(version); K(ext); K(minCTAs); K(maxCTAs); K(nvlsCTAs); K(cgaClusterSize); K(algSelection);
  K(forceAlgSelection); K(CTAPolicy); K(userProfilerTag); K(launchCompletionEvent);
#define X(field) FIELD(ncclConfigExt_t, field)
  X(next); X(key); X(val);
  FIELD(ncclSimInfo_t, estimatedTime); FIELD(ncclEncryptionConfig_t, mode); FIELD(ncclEncryptionConfig_t, psk);
  FIELD(ncclWaitSignalDesc_t, opCnt); FIELD(ncclWaitSignalDesc_t, peer); FIELD(ncclWaitSignalDesc_t, sigIdx);
  FIELD(ncclWaitSignalDesc_t, ctx);
  VALUE(NCCL_MAJOR); VALUE(NCCL_MINOR); VALUE(NCCL_PATCH); VALUE(NCCL_VERSION_CODE); VALUE(NCCL_VERSION(2, 8, 4));
  VALUE(NCCL_VERSION(2, 32, 3)); VALUE(NCCL_UNIQUE_ID_BYTES); VALUE(NCCL_API_MAGIC); VALUE(NCCL_CONFIG_UNDEF_INT);
  VALUE(NCCL_SPLIT_NOCOLOR); VALUE(NCCL_SHRINK_DEFAULT); VALUE(NCCL_SHRINK_ABORT); VALUE(NCCL_REVOKE_DEFAULT);
  VALUE(NCCL_SUSPEND_MEM); VALUE(NCCL_CTA_POLICY_DEFAULT); VALUE(NCCL_CTA_POLICY_EFFICIENCY);
  VALUE(NCCL_CTA_POLICY_ZERO); VALUE(NCCL_WIN_DEFAULT); VALUE(NCCL_WIN_COLL_SYMMETRIC);
  VALUE(NCCL_WIN_STRICT_ORDERING); VALUE(NCCL_WIN_GIN_ONLY); VALUE(NCCL_WIN_CFT_COUNTED);
  VALUE(NCCL_WIN_REQUIRED_ALIGNMENT); VALUE(NCCL_UNDEF_FLOAT);
  VALUE(ncclSuccess); VALUE(ncclUnhandledCudaError); VALUE(ncclSystemError); VALUE(ncclInternalError);
  VALUE(ncclInvalidArgument); VALUE(ncclInvalidUsage); VALUE(ncclRemoteError); VALUE(ncclInProgress);
  VALUE(ncclTimeout); VALUE(ncclNumResults);
  VALUE(ncclInt8); VALUE(ncclChar); VALUE(ncclUint8); VALUE(ncclInt32); VALUE(ncclInt); VALUE(ncclUint32);
  VALUE(ncclInt64); VALUE(ncclUint64); VALUE(ncclFloat16); VALUE(ncclHalf); VALUE(ncclFloat32); VALUE(ncclFloat);
  VALUE(ncclFloat64); VALUE(ncclDouble); VALUE(ncclBfloat16); VALUE(ncclFloat8e4m3); VALUE(ncclFloat8e5m2);
  VALUE(ncclNumTypes);
  VALUE(ncclSum); VALUE(ncclProd); VALUE(ncclMax); VALUE(ncclMin); VALUE(ncclAvg); VALUE(ncclNumOps);
  VALUE(ncclMaxRedOp); VALUE(ncclScalarDevice); VALUE(ncclScalarHostImmediate);
  VALUE(ncclStatGpuMemSuspend); VALUE(ncclStatGpuMemSuspended); VALUE(ncclStatGpuMemPersist);
  VALUE(ncclStatGpuMemTotal); VALUE(NCCL_ENCRYPTION_MODE_NONE); VALUE(NCCL_ENCRYPTION_MODE_PSK);
  VALUE(ncclHostCftDefault); VALUE(ncclHostCftEnable); VALUE(ncclHostCftDisable); VALUE(ncclHostCftFallback);
  VALUE(ncclNvlsHostModeDefault); VALUE(ncclNvlsHostModeEnable); VALUE(ncclNvlsHostModeDisableTransport);
  VALUE(ncclNvlsHostModeDisableSymmetricMultimem); VALUE(ncclNvlsHostModeDisable);
  /* Initialisers, up to the end of the last field: what follows is padding. */
#define INITIALISED(type, initialiser, last) \
  do { \
    type fresh = initialiser; \
    bytes(#initialiser, &fresh, offsetof(type, last) + sizeof(fresh.last)); \
  } while (0)
  INITIALISED(ncclConfig_t, NCCL_CONFIG_INITIALIZER, nvlsHostMode);
  INITIALISED(ncclCollConfig_t, NCCL_COLLCONFIG_INITIALIZER, launchCompletionEvent);
  ncclSimInfo_t sim = NCCL_SIM_INFO_INITIALIZER;
  printf("sim %zu %x %u %g\n", sim.size, sim.magic, sim.version, (double)sim.estimatedTime);
  ncclEncryptionConfig_t crypt = NCCL_ENCRYPTION_CONFIG_INITIALIZER;
  printf("encryption %zu %x %u %d %d\n", crypt.size, crypt.magic, crypt.version, crypt.mode, crypt.psk == NULL);
  return 0;
}
