package engine

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"time"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/internal/dialect"
)

// Transaction is an open transaction that holds a claim.
type Transaction struct {
	engine   *Engine
	tx       Tx
	key      inbox.Key
	ctx      context.Context // the claim's
	finished bool            // Commit was called
}

var _ inbox.Transaction = (*Transaction)(nil)

// NewTransaction is a transaction without a claim, for unit tests of handlers.
func NewTransaction(tx Tx) *Transaction { return &Transaction{tx: tx} }

// Tx is the driver's side of the transaction.
func (t *Transaction) Tx() Tx { return t.tx }

// Exec runs a handler's statement in the transaction. By this method package outbox knows a transaction of ours.
func (t *Transaction) Exec(ctx context.Context, statement string, args ...any) (int64, error) {
	return t.tx.Exec(ctx, statement, args...)
}

// beginAndClaim opens the transaction, claims the key in it and returns the number of rows inserted. After
// an error there is no transaction.
func (t *Transaction) beginAndClaim(ctx context.Context) (inserted int64, err error) {
	e := t.engine
	opening, then := Opening{First: e.dialect.Claim(e.Table(), t.key)}, dialect.Query{}
	if begins, ok := e.dialect.(dialect.BeginClaimer); ok && e.driver.Fuses {
		opening.Guarded = begins.BeginClaim(e.Table(), t.key)
	}
	if !e.driver.NoticesEnd {
		proof, _ := e.dialect.Proof()
		if len(opening.First.Args) == 0 { // in one message
			opening.First.Text = proof.Text + "; " + opening.First.Text
			if opening.Guarded.Text != "" {
				opening.Guarded.Text = proof.Text + "; " + opening.Guarded.Text
			}
		} else {
			opening.First, then = proof, opening.First
		}
	}
	if t.tx, inserted, err = e.pool.Begin(ctx, opening); err != nil {
		return 0, fmt.Errorf("cannot begin and claim: %w", err)
	}
	if then.Text == "" {
		return inserted, nil
	}
	if inserted, err = t.tx.Exec(ctx, then.Text, then.Args...); err != nil {
		_ = t.tx.Rollback() // the error says more
		return 0, fmt.Errorf("cannot claim: %w", err)
	}
	return inserted, nil
}

var errRolledBack = errors.New("the transaction has been rolled back")

// Store implements [inbox.Transaction].
func (t *Transaction) Store(ctx context.Context, params inbox.StoreParams) (time.Time, error) {
	if t.finished {
		return time.Time{}, errRolledBack
	}
	var processedAt int64
	query := t.engine.dialect.Store(t.engine.Table(), t.key, params, t.engine.driver.FreeParameters)
	err := one(ctx, t.tx, query, &processedAt)
	switch {
	case errors.Is(err, errNoRow):
		return time.Time{}, t.ended(errors.New("the claim is gone from it"))
	case err != nil && (t.tx.IsBroken(err) || t.engine.dialect.IsTransactionOver(err)):
		return time.Time{}, t.broken(ctx, err)
	case err != nil && t.engine.dialect.IsDenied(err) && t.mayStore(ctx):
		return time.Time{}, fmt.Errorf("%w: it has another role: %w", inbox.ErrTransactionBroken, err)
	case err != nil:
		return time.Time{}, err // the statement is ours, and so is the table
	}
	return time.UnixMicro(processedAt), nil
}

// mayStore reports, after a Store was denied, whether the role that connects may do it.
func (t *Transaction) mayStore(ctx context.Context) bool {
	t.finished = true
	_ = t.tx.Rollback() // gives the connection back: the pool may have no other one
	ctx, cancel := context.WithTimeout(ctx, proofTimeout)
	defer cancel()
	return t.engine.Check(ctx) == nil
}

// Commit implements [inbox.Transaction].
func (t *Transaction) Commit(ctx context.Context) error {
	if t.finished {
		return errRolledBack
	}
	t.finished = true
	var proof dialect.Query
	if !t.engine.driver.NoticesEnd {
		_, proof = t.engine.dialect.Proof()
		if !t.engine.driver.ProvesWithCommit {
			if _, err := t.tx.Exec(ctx, proof.Text, proof.Args...); err != nil {
				return t.unproven(ctx, err)
			}
			proof = dialect.Query{}
		}
	}
	if err := t.tx.Commit(ctx, proof); err != nil {
		return t.broken(ctx, err)
	}
	return nil
}

// unproven is the error of a proof that failed. Database/sql closes the rows that a handler has left open only at the end
// of the transaction; until then a driver may refuse every statement as if the connection were gone.
func (t *Transaction) unproven(ctx context.Context, err error) error {
	if errors.Is(err, driver.ErrBadConn) && ctx.Err() == nil && t.tx.Rollback() == nil {
		return fmt.Errorf("%w: it has left rows open (%v)", inbox.ErrTransactionBroken, err)
	}
	return t.broken(ctx, err)
}

// broken finds the handler's faults among the server's. With a live context only the handler can have ended or failed
// the transaction.
func (t *Transaction) broken(ctx context.Context, err error) error {
	d := t.engine.dialect
	switch {
	case ctx.Err() != nil:
		return err
	case t.isEnded(err):
		return t.ended(err)
	case t.tx.IsBroken(err) || d.IsTransactionOver(err) || d.IsBrokenByHandler(err):
		return fmt.Errorf("%w: %w", inbox.ErrTransactionBroken, err)
	}
	return err
}

// isEnded reports whether an error says that the transaction has ended before, rather than failed.
func (t *Transaction) isEnded(err error) bool {
	d := t.engine.dialect
	return t.tx.IsEnded(err) || d.IsTransactionOver(err) && !d.IsTransactionFailed(err)
}

// ended is the error for a handler that has ended its transaction. No retry cures that, and a retry would take what the
// handler has committed for a duplicate.
func (t *Transaction) ended(err error) error {
	t.finished = true
	_ = t.tx.Rollback() // gives the connection back: the pool may have no other one for the look
	ctx, cancel := context.WithTimeout(t.ctx, proofTimeout)
	defer cancel()
	done := "the claim is rolled back; what the handler wrote after it had ended the transaction may be committed"
	record, lookErr := t.engine.Look(ctx, inbox.ClaimParams{Key: t.key})
	switch {
	case lookErr != nil:
		done = "it is not known whether the claim is committed"
	case record != nil: // nobody else can have claimed since, but another copy of the message
		done = "the claim, and what the handler wrote before it ended the transaction, are committed: a copy of the message is a duplicate"
	}
	return inbox.Permanent(fmt.Errorf("%w: it has ended it: %s: %w", inbox.ErrTransactionBroken, done, err))
}

// Rollback implements [inbox.Transaction]. A transaction that has failed cannot be asked whether it is still the one in
// which the message was claimed.
func (t *Transaction) Rollback() error {
	if t.finished {
		_ = t.tx.Rollback() // what there is to say was said
		return nil
	}
	t.finished = true
	proven := t.prove()
	err := t.tx.Rollback()
	switch {
	case t.ctx.Err() != nil && (err == nil || t.tx.IsEnded(err)):
		return nil // it has ended with its context
	case proven != nil:
		return t.ended(proven)
	case err != nil && t.tx.IsEnded(err):
		return t.ended(err)
	}
	return err
}

// proofTimeout bounds the question whether a transaction that is to be rolled back is still open, and what became of one
// that is not.
const proofTimeout = 5 * time.Second

// prove returns an error when the transaction has ended, and nil in doubt.
func (t *Transaction) prove() error {
	e := t.engine
	if e.driver.NoticesEnd || t.ctx.Err() != nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(t.ctx, proofTimeout)
	defer cancel()
	_, proof := e.dialect.Proof()
	if _, err := t.tx.Exec(ctx, proof.Text, proof.Args...); err != nil && ctx.Err() == nil && t.isEnded(err) {
		return err
	}
	return nil
}
