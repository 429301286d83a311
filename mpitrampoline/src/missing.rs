//! The functions of MPI that XLA does not call: each ends the program and says its name.

use std::ffi::CString;

fn end(name: &str) -> ! {
    let name = name.replacen("ABI_", "_", 1);
    let text = format!(
        "strata: {name} was called, which libstrata_mpitrampoline.so does not have: it has what JAX's collectives on \
         processors call; for other programs set MPITRAMPOLINE_LIB to a wrapped MPI\n"
    );
    let text = CString::new(text).unwrap_or_default();
    // SAFETY: the bytes must be readable; because they are a string's of this length. Nothing is to be done about an error.
    let _ = unsafe { libc::write(2, text.as_ptr().cast(), text.as_bytes().len()) };
    // SAFETY: no requirement.
    unsafe { libc::abort() }
}

macro_rules! missing {
    ($($name:ident)*) => {
        $(
            #[no_mangle]
            #[allow(non_snake_case)]
            extern "C" fn $name() -> ! {
                end(stringify!($name))
            }
        )*
    };
}

missing! {
    MPIABI_Comm_compare MPIABI_Get_count MPIABI_Bsend MPIABI_Ssend MPIABI_Rsend MPIABI_Buffer_attach MPIABI_Buffer_detach MPIABI_Ibsend
    MPIABI_Issend MPIABI_Irsend MPIABI_Test MPIABI_Request_free MPIABI_Waitany MPIABI_Testany MPIABI_Testall
    MPIABI_Waitsome MPIABI_Testsome MPIABI_Request_get_status MPIABI_Iprobe MPIABI_Probe MPIABI_Improbe
    MPIABI_Mprobe MPIABI_Mrecv MPIABI_Imrecv MPIABI_Cancel MPIABI_Test_cancelled MPIABI_Send_init MPIABI_Bsend_init
    MPIABI_Ssend_init MPIABI_Rsend_init MPIABI_Recv_init MPIABI_Start MPIABI_Startall MPIABI_Sendrecv_replace
    MPIABI_Type_contiguous MPIABI_Type_vector MPIABI_Type_create_hvector MPIABI_Type_indexed
    MPIABI_Type_create_hindexed MPIABI_Type_create_indexed_block MPIABI_Type_create_hindexed_block
    MPIABI_Type_create_struct MPIABI_Type_struct MPIABI_Type_create_subarray MPIABI_Type_create_darray
    MPIABI_Get_address MPIABI_Aint_add MPIABI_Aint_diff MPIABI_Type_size_x MPIABI_Type_get_extent
    MPIABI_Type_get_extent_x MPIABI_Type_create_resized MPIABI_Type_get_true_extent MPIABI_Type_get_true_extent_x
    MPIABI_Type_commit MPIABI_Type_free MPIABI_Type_dup MPIABI_Get_elements MPIABI_Get_elements_x
    MPIABI_Type_get_envelope MPIABI_Type_get_contents MPIABI_Pack MPIABI_Unpack MPIABI_Pack_size
    MPIABI_Pack_external MPIABI_Unpack_external MPIABI_Pack_external_size MPIABI_Gather MPIABI_Gatherv
    MPIABI_Scatter MPIABI_Scatterv MPIABI_Allgatherv MPIABI_Alltoallv MPIABI_Alltoallw MPIABI_Op_create
    MPIABI_Op_free MPIABI_Op_commutative MPIABI_Reduce_local MPIABI_Scan MPIABI_Exscan MPIABI_Ibarrier MPIABI_Ibcast
    MPIABI_Igather MPIABI_Igatherv MPIABI_Iscatter MPIABI_Iscatterv MPIABI_Iallgather MPIABI_Iallgatherv
    MPIABI_Ialltoall MPIABI_Ialltoallv MPIABI_Ialltoallw MPIABI_Ireduce MPIABI_Iallreduce
    MPIABI_Ireduce_scatter_block MPIABI_Ireduce_scatter MPIABI_Iscan MPIABI_Iexscan MPIABI_Group_size
    MPIABI_Group_rank MPIABI_Group_translate_ranks MPIABI_Group_compare MPIABI_Comm_group MPIABI_Group_union
    MPIABI_Group_intersection MPIABI_Group_difference MPIABI_Group_incl MPIABI_Group_excl MPIABI_Group_range_incl
    MPIABI_Group_range_excl MPIABI_Group_free MPIABI_Comm_dup_with_info MPIABI_Comm_idup MPIABI_Comm_create
    MPIABI_Comm_create_group MPIABI_Comm_split_type MPIABI_Comm_set_info MPIABI_Comm_get_info MPIABI_Comm_test_inter
    MPIABI_Comm_remote_size MPIABI_Comm_remote_group MPIABI_Intercomm_create MPIABI_Intercomm_merge
    MPIABI_Comm_create_keyval MPIABI_Comm_free_keyval MPIABI_Comm_set_attr MPIABI_Comm_get_attr
    MPIABI_Comm_delete_attr MPIABI_Win_create_keyval MPIABI_Win_free_keyval MPIABI_Win_set_attr MPIABI_Win_get_attr
    MPIABI_Win_delete_attr MPIABI_Type_create_keyval MPIABI_Type_free_keyval MPIABI_Type_set_attr
    MPIABI_Type_get_attr MPIABI_Type_delete_attr MPIABI_Comm_set_name MPIABI_Comm_get_name MPIABI_Type_set_name
    MPIABI_Type_get_name MPIABI_Win_set_name MPIABI_Win_get_name MPIABI_Cart_create MPIABI_Dims_create
    MPIABI_Graph_create MPIABI_Dist_graph_create_adjacent MPIABI_Dist_graph_create MPIABI_Topo_test
    MPIABI_Graphdims_get MPIABI_Graph_get MPIABI_Cartdim_get MPIABI_Cart_get MPIABI_Cart_rank MPIABI_Cart_coords
    MPIABI_Graph_neighbors_count MPIABI_Graph_neighbors MPIABI_Dist_graph_neighbors_count
    MPIABI_Dist_graph_neighbors MPIABI_Cart_shift MPIABI_Cart_sub MPIABI_Cart_map MPIABI_Graph_map
    MPIABI_Neighbor_allgather MPIABI_Neighbor_allgatherv MPIABI_Neighbor_alltoall MPIABI_Neighbor_alltoallv
    MPIABI_Neighbor_alltoallw MPIABI_Ineighbor_allgather MPIABI_Ineighbor_allgatherv MPIABI_Ineighbor_alltoall
    MPIABI_Ineighbor_alltoallv MPIABI_Ineighbor_alltoallw MPIABI_Alloc_mem MPIABI_Free_mem
    MPIABI_Comm_create_errhandler MPIABI_Comm_get_errhandler MPIABI_Win_create_errhandler MPIABI_Win_set_errhandler
    MPIABI_Win_get_errhandler MPIABI_File_create_errhandler MPIABI_File_set_errhandler MPIABI_File_get_errhandler
    MPIABI_Errhandler_free MPIABI_Add_error_class MPIABI_Add_error_code MPIABI_Add_error_string
    MPIABI_Comm_call_errhandler MPIABI_Win_call_errhandler MPIABI_File_call_errhandler MPIABI_Info_create
    MPIABI_Info_set MPIABI_Info_delete MPIABI_Info_get MPIABI_Info_get_valuelen MPIABI_Info_get_nkeys
    MPIABI_Info_get_nthkey MPIABI_Info_dup MPIABI_Info_free MPIABI_Comm_spawn MPIABI_Comm_get_parent
    MPIABI_Comm_spawn_multiple MPIABI_Open_port MPIABI_Close_port MPIABI_Comm_accept MPIABI_Comm_connect
    MPIABI_Publish_name MPIABI_Unpublish_name MPIABI_Lookup_name MPIABI_Comm_disconnect MPIABI_Comm_join
    MPIABI_Win_create MPIABI_Win_allocate MPIABI_Win_allocate_shared MPIABI_Win_shared_query
    MPIABI_Win_create_dynamic MPIABI_Win_attach MPIABI_Win_detach MPIABI_Win_free MPIABI_Win_get_group
    MPIABI_Win_set_info MPIABI_Win_get_info MPIABI_Put MPIABI_Get MPIABI_Accumulate MPIABI_Get_accumulate
    MPIABI_Fetch_and_op MPIABI_Compare_and_swap MPIABI_Rput MPIABI_Rget MPIABI_Raccumulate MPIABI_Rget_accumulate
    MPIABI_Win_fence MPIABI_Win_start MPIABI_Win_complete MPIABI_Win_post MPIABI_Win_wait MPIABI_Win_test
    MPIABI_Win_lock MPIABI_Win_lock_all MPIABI_Win_unlock MPIABI_Win_unlock_all MPIABI_Win_flush
    MPIABI_Win_flush_all MPIABI_Win_flush_local MPIABI_Win_flush_local_all MPIABI_Win_sync MPIABI_Grequest_start
    MPIABI_Grequest_complete MPIABI_Status_set_elements MPIABI_Status_set_elements_x MPIABI_Status_set_cancelled
    MPIABI_File_open MPIABI_File_close MPIABI_File_delete MPIABI_File_set_size MPIABI_File_preallocate
    MPIABI_File_get_size MPIABI_File_get_group MPIABI_File_get_amode MPIABI_File_set_info MPIABI_File_get_info
    MPIABI_File_set_view MPIABI_File_get_view MPIABI_File_read_at MPIABI_File_read_at_all MPIABI_File_write_at
    MPIABI_File_write_at_all MPIABI_File_iread_at MPIABI_File_iread_at_all MPIABI_File_iwrite_at
    MPIABI_File_iwrite_at_all MPIABI_File_read MPIABI_File_read_all MPIABI_File_write MPIABI_File_write_all
    MPIABI_File_iread MPIABI_File_iread_all MPIABI_File_iwrite MPIABI_File_iwrite_all MPIABI_File_seek
    MPIABI_File_get_position MPIABI_File_get_byte_offset MPIABI_File_read_shared MPIABI_File_write_shared
    MPIABI_File_iread_shared MPIABI_File_iwrite_shared MPIABI_File_read_ordered MPIABI_File_write_ordered
    MPIABI_File_seek_shared MPIABI_File_get_position_shared MPIABI_File_read_at_all_begin
    MPIABI_File_read_at_all_end MPIABI_File_write_at_all_begin MPIABI_File_write_at_all_end
    MPIABI_File_read_all_begin MPIABI_File_read_all_end MPIABI_File_write_all_begin MPIABI_File_write_all_end
    MPIABI_File_read_ordered_begin MPIABI_File_read_ordered_end MPIABI_File_write_ordered_begin
    MPIABI_File_write_ordered_end MPIABI_File_get_type_extent MPIABI_Register_datarep MPIABI_File_set_atomicity
    MPIABI_File_get_atomicity MPIABI_File_sync MPIABI_Type_create_f90_real MPIABI_Type_create_f90_complex
    MPIABI_Type_create_f90_integer MPIABI_Type_match_size MPIABI_Comm_f2c MPIABI_Comm_c2f MPIABI_Type_f2c
    MPIABI_Type_c2f MPIABI_Group_f2c MPIABI_Group_c2f MPIABI_Request_f2c MPIABI_Request_c2f MPIABI_File_f2c
    MPIABI_File_c2f MPIABI_Win_f2c MPIABI_Win_c2f MPIABI_Op_f2c MPIABI_Op_c2f MPIABI_Info_f2c MPIABI_Info_c2f
    MPIABI_Errhandler_f2c MPIABI_Errhandler_c2f MPIABI_Message_f2c MPIABI_Message_c2f MPIABI_Status_f2c
    MPIABI_Status_c2f MPIXABI_Query_cuda_support MPIXABI_Query_hip_support MPIXABI_Query_rocm_support
    MPIXABI_Query_ze_support
}
