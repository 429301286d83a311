//! Functions that programs look up all at once and may never call: they are there, and not supported.
#![allow(non_snake_case)]

use softgpu::fault::NOT_SUPPORTED;

macro_rules! absent {
    ($($name:ident)*) => {
        // Their arguments are not looked at.
        softgpu::exports! { early: $(fn $name() { Err(NOT_SUPPORTED) })* }
    };
}

absent! {
    cuCtxFromGreenCtx cuDevResourceGenerateDesc cuDevSmResourceSplitByCount cuDeviceGetDevResource
    cuGreenCtxCreate cuGreenCtxDestroy cuGreenCtxStreamCreate
    cuLogsRegisterCallback cuLogsUnregisterCallback
    cuMemExportToShareableHandle cuMemImportFromShareableHandle
    cuMulticastAddDevice cuMulticastBindMem cuMulticastCreate cuMulticastUnbind
}
