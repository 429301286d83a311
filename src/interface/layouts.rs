//! Structures that C programs and the library share, with the layouts of NCCL 2.32.3 held by assertions.

use super::pointer::{ConstPtr, PlainData, Ptr, Text};
use super::types::CType;
use crate::error::{Error, Result};
use std::ffi::{c_int, c_void};
use std::mem::offset_of;

/// What an integer field holds that the program has not set.
pub const UNDEFINED: c_int = c_int::MIN;
/// What the `magic` field of most structures holds.
pub const MAGIC: u32 = 0xcafe_beef;
/// What the `magic` field of `ncclSimInfo_t` holds.
pub const SIM_MAGIC: u32 = 0x7468_5283;
/// The release whose interface this is, as `ncclGetVersion` tells it.
pub const VERSION: c_int = 23203;

/// `ncclUniqueId`
#[derive(Clone, Copy)]
#[repr(C)]
pub struct UniqueIdBytes(pub [u8; 128]);

/// What versioned structures begin with.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Head {
    /// Bytes of the structure in the program's header.
    pub size: usize,
    /// Shows that the structure was initialised.
    pub magic: u32,
    /// The release of the program's header.
    pub version: u32,
}

/// `ncclConfig_t`
#[derive(Debug, Clone, Copy)]
#[repr(C)]
#[allow(missing_docs)]
pub struct NcclConfig {
    pub head: Head,
    pub blocking: c_int,
    pub cga_cluster_size: c_int,
    pub min_ctas: c_int,
    pub max_ctas: c_int,
    pub net_name: Text,
    pub split_share: c_int,
    pub traffic_class: c_int,
    pub comm_name: Text,
    pub collnet_enable: c_int,
    pub cta_policy: c_int,
    pub shrink_share: c_int,
    pub nvls_ctas: c_int,
    pub n_channels_per_net_peer: c_int,
    pub nvlink_centric_sched: c_int,
    pub graph_usage_mode: c_int,
    pub num_rma_ctx: c_int,
    pub max_p2p_peers: c_int,
    pub graph_stream_ordering: c_int,
    pub launch_order_implicit: c_int,
    pub num_rma_sig: c_int,
    pub rma_eager_init: c_int,
    pub host_cft_mode: c_int,
    pub nvls_host_mode: c_int,
}

/// `ncclCollConfig_t`
#[derive(Debug, Clone, Copy)]
#[repr(C)]
#[allow(missing_docs)]
pub struct CollConfig {
    pub head: Head,
    pub ext: usize,
    pub min_ctas: c_int,
    pub max_ctas: c_int,
    pub nvls_ctas: c_int,
    pub cga_cluster_size: c_int,
    pub alg_selection: Text,
    pub force_alg_selection: c_int,
    pub cta_policy: c_int,
    pub user_profiler_tag: u64,
    pub launch_completion_event: usize,
}

/// `ncclSimInfo_t`
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct SimInfo {
    /// The common head.
    pub head: Head,
    /// Microseconds.
    pub estimated_time: f32,
}

/// `ncclEncryptionConfig_t`
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct EncryptionConfig {
    /// The common head.
    pub head: Head,
    /// 0: plain text, 1: a pre-shared key.
    pub mode: c_int,
    /// The key.
    pub psk: Text,
}

/// `ncclTeam_t`
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Team {
    /// How many ranks it has.
    pub nranks: c_int,
    /// Which of them is this one.
    pub rank: c_int,
    /// The distance of neighbours in the communicator.
    pub stride: c_int,
}

impl Team {
    /// No team.
    pub const NONE: Team = Team { nranks: 0, rank: 0, stride: 0 };
}

/// `ncclCommProperties_t`
#[derive(Debug, Clone, Copy)]
#[repr(C)]
#[allow(missing_docs)]
pub struct CommProperties {
    pub head: Head,
    pub rank: c_int,
    pub nranks: c_int,
    pub cuda_dev: c_int,
    pub nvml_dev: c_int,
    pub device_api_support: u8,
    pub multimem_support: u8,
    pub gin_type: c_int,
    pub n_lsa_teams: c_int,
    pub host_rma_support: u8,
    pub railed_gin_type: c_int,
    pub comm_hash: u64,
    pub gin_min_stride: c_int,
    pub gin_connection_type: c_int,
    pub gin_support: [u8; 64],
    pub dev_comm_runtime_version_size: usize,
    pub cft_support: u8,
    pub cft_multicast_support: u8,
    pub cft_counted_support: u8,
}

const _: () = {
    let pointer = size_of::<*const c_void>();
    assert!(pointer == 8, "the layouts below are those of 64-bit machines");
    assert!(size_of::<UniqueIdBytes>() == 128);
    assert!(size_of::<Head>() == 16 && offset_of!(Head, magic) == 8 && offset_of!(Head, version) == 12);
    assert!(size_of::<NcclConfig>() == 120);
    assert!(offset_of!(NcclConfig, blocking) == 16 && offset_of!(NcclConfig, net_name) == 32);
    assert!(offset_of!(NcclConfig, split_share) == 40 && offset_of!(NcclConfig, comm_name) == 48);
    assert!(offset_of!(NcclConfig, graph_usage_mode) == 80 && offset_of!(NcclConfig, max_p2p_peers) == 88);
    assert!(offset_of!(NcclConfig, launch_order_implicit) == 96 && offset_of!(NcclConfig, nvls_host_mode) == 112);
    assert!(size_of::<CollConfig>() == 72);
    assert!(offset_of!(CollConfig, ext) == 16 && offset_of!(CollConfig, alg_selection) == 40);
    assert!(offset_of!(CollConfig, user_profiler_tag) == 56 && offset_of!(CollConfig, launch_completion_event) == 64);
    assert!(size_of::<SimInfo>() == 24 && offset_of!(SimInfo, estimated_time) == 16);
    assert!(size_of::<EncryptionConfig>() == 32 && offset_of!(EncryptionConfig, psk) == 24);
    assert!(size_of::<Team>() == 12);
    assert!(size_of::<CommProperties>() == 152 && offset_of!(CommProperties, comm_hash) == 56);
    assert!(offset_of!(CommProperties, gin_support) == 72 && offset_of!(CommProperties, cft_support) == 144);
};

/// A structure that tells its own size and release.
pub trait Versioned: PlainData {
    /// Its name in C.
    const NAME: &'static str;
    /// What its magic field holds.
    const MAGIC: u32;
    /// Bytes of its first release; a shorter one is broken.
    const LEAST: usize;
    /// What a program gets that sets nothing.
    const DEFAULT: Self;
}

macro_rules! versioned {
    ($($type:ident = $name:literal, $magic:expr, $least:literal, { $($field:ident: $value:expr),* $(,)? };)*) => { $(
        impl CType for $type {
            fn c() -> String {
                $name.to_string()
            }
        }

        // SAFETY: all fields are integers, floats and texts; because they are declared so above.
        unsafe impl PlainData for $type {}

        impl Versioned for $type {
            const NAME: &'static str = $name;
            const MAGIC: u32 = $magic;
            const LEAST: usize = $least;
            const DEFAULT: $type = $type {
                head: Head { size: size_of::<$type>(), magic: $magic, version: VERSION as u32 },
                $($field: $value),*
            };
        }
    )* };
}

versioned! {
    NcclConfig = "ncclConfig_t", MAGIC, 24, {
        blocking: UNDEFINED, cga_cluster_size: UNDEFINED, min_ctas: UNDEFINED, max_ctas: UNDEFINED,
        net_name: Text::NULL, split_share: UNDEFINED, traffic_class: UNDEFINED, comm_name: Text::NULL,
        collnet_enable: UNDEFINED, cta_policy: UNDEFINED, shrink_share: UNDEFINED, nvls_ctas: UNDEFINED,
        n_channels_per_net_peer: UNDEFINED, nvlink_centric_sched: UNDEFINED, graph_usage_mode: UNDEFINED,
        num_rma_ctx: UNDEFINED, max_p2p_peers: UNDEFINED, graph_stream_ordering: UNDEFINED,
        launch_order_implicit: UNDEFINED, num_rma_sig: UNDEFINED, rma_eager_init: UNDEFINED,
        host_cft_mode: UNDEFINED, nvls_host_mode: UNDEFINED,
    };
    CollConfig = "ncclCollConfig_t", MAGIC, 64, {
        ext: 0, min_ctas: UNDEFINED, max_ctas: UNDEFINED, nvls_ctas: UNDEFINED, cga_cluster_size: UNDEFINED,
        alg_selection: Text::NULL, force_alg_selection: 1, cta_policy: UNDEFINED, user_profiler_tag: 0,
        launch_completion_event: 0,
    };
    SimInfo = "ncclSimInfo_t", SIM_MAGIC, 24, { estimated_time: -1.0 };
    EncryptionConfig = "ncclEncryptionConfig_t", MAGIC, 32, { mode: 0, psk: Text::NULL };
    CommProperties = "ncclCommProperties_t", MAGIC, 144, {
        rank: 0, nranks: 0, cuda_dev: 0, nvml_dev: 0, device_api_support: 0, multimem_support: 0, gin_type: 0,
        n_lsa_teams: 0, host_rma_support: 0, railed_gin_type: 0, comm_hash: 0, gin_min_stride: 0,
        gin_connection_type: 0, gin_support: [0; 64], dev_comm_runtime_version_size: 0, cft_support: 0,
        cft_multicast_support: 0, cft_counted_support: 0,
    };
}

impl CType for Team {
    fn c() -> String {
        "ncclTeam_t".to_string()
    }
}

impl CType for UniqueIdBytes {
    fn c() -> String {
        "ncclUniqueId".to_string()
    }
}

// SAFETY: all fields are integers; because they are declared so above.
unsafe impl PlainData for Head {}

/// Reads a versioned structure of any release: fields that its release does not have are undefined.
pub fn read_versioned<T: Versioned>(pointer: ConstPtr<T>) -> Result<T> {
    let head = pointer.cast::<Head>().get(T::NAME)?;
    if head.magic != T::MAGIC {
        return Err(Error::InvalidArgument(format!("{} argument not initialized via its initializer", T::NAME)));
    }
    if head.size < T::LEAST {
        let text = format!("{} argument says that it has {} bytes; it must have {}", T::NAME, head.size, T::LEAST);
        return Err(Error::InvalidArgument(text));
    }
    Ok(pointer.get_prefix(head.size, T::DEFAULT))
}

/// Writes a versioned structure back, as many bytes of it as the program's release has.
pub fn write_versioned<T: Versioned>(pointer: Ptr<T>, value: &T) -> Result<()> {
    let head = pointer.as_const().cast::<Head>().get(T::NAME)?;
    pointer.set_prefix(head.size, value)
}
