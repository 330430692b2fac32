// A repository that fails at a chosen step: for TestHandler, TestRepository and any test of yours.

package inboxtest

import (
	"context"
	"time"

	inbox "github.com/devmappa/watermill-inbox"
)

// FaultPoint is a place in the flow at which a [FaultRepository] calls its function.
type FaultPoint string

// The points in the order in which a message meets them. Opening and claiming are one call, so there is
// nothing between them. An error returned before a step prevents it; an error returned after a step hides
// that it was done, as a lost answer does.
const (
	BeforeClaim    FaultPoint = "before claim"
	AfterClaim     FaultPoint = "after claim"
	BeforeStore    FaultPoint = "before store"
	AfterStore     FaultPoint = "after store"
	BeforeCommit   FaultPoint = "before commit"
	AfterCommit    FaultPoint = "after commit"
	BeforeRollback FaultPoint = "before rollback"
	AfterRollback  FaultPoint = "after rollback"
	BeforeMark     FaultPoint = "before mark" // of stored messages as sent, after the acknowledgement
	AfterMark      FaultPoint = "after mark"
)

// FaultRepository wraps a repository and calls a function before and after each step. The function may
// return an error, panic, block, or end the process.
type FaultRepository struct {
	inbox.Repository
	fault func(FaultPoint, inbox.Key) error
}

// NewFaultRepository returns the wrapper. The function is called by many goroutines.
func NewFaultRepository(repository inbox.Repository, fault func(FaultPoint, inbox.Key) error) *FaultRepository {
	return &FaultRepository{Repository: repository, fault: fault}
}

// Claim implements [inbox.Repository].
func (r *FaultRepository) Claim(ctx context.Context, params inbox.ClaimParams) (inbox.Transaction, *inbox.Record, error) {
	if err := r.fault(BeforeClaim, params.Key); err != nil {
		return nil, nil, err
	}
	transaction, record, err := r.Repository.Claim(ctx, params)
	if err != nil {
		return nil, nil, err
	}
	if err := r.fault(AfterClaim, params.Key); err != nil {
		if transaction != nil {
			_ = transaction.Rollback()
		}
		return nil, nil, err
	}
	if transaction == nil {
		return nil, record, nil
	}
	return &faultTransaction{Transaction: transaction, fault: func(point FaultPoint) error { return r.fault(point, params.Key) }}, nil, nil
}

// MarkSent implements [inbox.Repository]. The function is called for each record.
func (r *FaultRepository) MarkSent(ctx context.Context, records []inbox.Record) (locked []inbox.Record, err error) {
	for _, record := range records {
		if err := r.fault(BeforeMark, record.Key); err != nil {
			return nil, err
		}
	}
	if locked, err = r.Repository.MarkSent(ctx, records); err != nil {
		return nil, err
	}
	for _, record := range records {
		if err := r.fault(AfterMark, record.Key); err != nil {
			return nil, err
		}
	}
	return locked, nil
}

type faultTransaction struct {
	inbox.Transaction
	fault func(FaultPoint) error
}

// Unwrap lets inbox.TransactionFromContext find the wrapped transaction.
func (t *faultTransaction) Unwrap() inbox.Transaction { return t.Transaction }

func (t *faultTransaction) Store(ctx context.Context, params inbox.StoreParams) (processedAt time.Time, err error) {
	err = t.around(BeforeStore, AfterStore, func() (err error) {
		processedAt, err = t.Transaction.Store(ctx, params)
		return err
	})
	return processedAt, err
}

func (t *faultTransaction) Commit(ctx context.Context) error {
	return t.around(BeforeCommit, AfterCommit, func() error { return t.Transaction.Commit(ctx) })
}

func (t *faultTransaction) Rollback() error {
	return t.around(BeforeRollback, AfterRollback, t.Transaction.Rollback)
}

func (t *faultTransaction) around(before, after FaultPoint, step func() error) error {
	if err := t.fault(before); err != nil {
		return err
	}
	if err := step(); err != nil {
		return err
	}
	return t.fault(after)
}
