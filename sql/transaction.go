package inboxsql

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"time"

	inbox "github.com/devmappa/watermill-inbox"
)

// TxFromContext returns the transaction in which the message is claimed. All that the handler writes
// through it is committed together with the claim, or not at all. The handler must neither commit nor
// roll it back. It returns false outside of a handler and once the transaction has ended.
//
// Watermill-sql has a function of the same name that returns its subscriber's transaction; writing
// through that one leaves the guarantee.
func TxFromContext(ctx context.Context) (*sql.Tx, bool) {
	t, ok := inbox.TransactionFromContext[*transaction](ctx)
	if !ok {
		return nil, false
	}
	return t.tx, true
}

// ContextWithTx returns a context in which [TxFromContext] finds the transaction, to unit-test a handler
// without a router: begin a transaction, call the handler, look at what it wrote, roll back.
func ContextWithTx(ctx context.Context, tx *sql.Tx) context.Context {
	return inbox.ContextWithTransaction(ctx, &transaction{tx: tx})
}

type transaction struct {
	repository *Repository
	tx         *sql.Tx
	key        inbox.Key
}

// beginAndClaim opens the transaction, claims the key in it and returns the number of rows inserted. After
// an error there is no transaction.
func (t *transaction) beginAndClaim(ctx context.Context) (inserted int64, err error) {
	r := t.repository
	if r.fused != nil {
		claim := &fusedClaim{
			query: r.fused.BeginClaimQuery(t.keyParams()).Query,
			idle:  r.schema.ClaimQuery(t.keyParams()).Query,
		}
		if t.tx, err = r.db.BeginTx(context.WithValue(ctx, fusedClaimContextKey{}, claim), r.txOptions); err != nil {
			return 0, fmt.Errorf("cannot begin and claim: %w", err)
		}
		return claim.inserted, nil
	}
	if t.tx, err = r.db.BeginTx(ctx, r.txOptions); err != nil {
		return 0, fmt.Errorf("cannot begin: %w", err)
	}
	if inserted, err = t.markAndClaim(ctx); err != nil {
		_ = t.Rollback() // the error says more
	}
	return inserted, err
}

func (t *transaction) markAndClaim(ctx context.Context) (inserted int64, err error) {
	mark, claim := t.repository.schema.MarkOpenQuery(t.proofParams()), t.repository.schema.ClaimQuery(t.keyParams())
	if mark.Query != "" && len(mark.Args)+len(claim.Args) == 0 {
		mark, claim = Query{}, Query{Query: mark.Query + "; " + claim.Query}
	}
	if _, err := t.exec(ctx, mark); err != nil {
		return 0, fmt.Errorf("cannot mark the transaction: %w", err)
	}
	if inserted, err = t.exec(ctx, claim); err != nil {
		return 0, fmt.Errorf("cannot claim: %w", err)
	}
	return inserted, nil
}

func (t *transaction) claim(ctx context.Context) (inserted int64, err error) {
	if inserted, err = t.exec(ctx, t.repository.schema.ClaimQuery(t.keyParams())); err != nil {
		return 0, fmt.Errorf("cannot claim: %w", err)
	}
	return inserted, nil
}

// decide returns nil when the claim is ours, or the record of the one who was before.
func (t *transaction) decide(ctx context.Context, inserted int64) (*inbox.Record, error) {
	for attempt := 1; ; attempt++ {
		if inserted == 1 {
			return nil, nil
		}
		record, err := t.record(ctx)
		if !errors.Is(err, sql.ErrNoRows) {
			return record, err
		}
		if attempt == 2 {
			return nil, inbox.ErrNoRecord
		}
		// A cleaner may have deleted the record between the claim and the look at it.
		if inserted, err = t.claim(ctx); err != nil {
			return nil, err
		}
	}
}

func (t *transaction) record(ctx context.Context) (*inbox.Record, error) {
	query := t.repository.schema.RecordQuery(t.keyParams())
	var (
		processedAt int64
		produced    []byte
	)
	if err := t.tx.QueryRowContext(ctx, query.Query, query.Args...).Scan(&processedAt, &produced); err != nil {
		return nil, fmt.Errorf("cannot read the record: %w", err)
	}
	return &inbox.Record{ProcessedAt: time.UnixMicro(processedAt), Produced: produced}, nil
}

// Store implements [inbox.Transaction].
func (t *transaction) Store(ctx context.Context, produced []byte) (time.Time, error) {
	query := t.repository.schema.StoreQuery(StoreParams{KeyParams: t.keyParams(), Produced: produced})
	var processedAt int64
	err := t.tx.QueryRowContext(ctx, query.Query, query.Args...).Scan(&processedAt)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return time.Time{}, fmt.Errorf("%w: the claim is gone from it", inbox.ErrTransactionBroken)
	case err != nil:
		return time.Time{}, t.broken(ctx, err, t.repository.schema.IsTransactionOver)
	}
	return time.UnixMicro(processedAt), nil
}

// Commit implements [inbox.Transaction].
func (t *transaction) Commit(ctx context.Context) error {
	if _, err := t.exec(ctx, t.repository.schema.ProveOpenQuery(t.proofParams())); err != nil {
		return t.broken(ctx, err, t.repository.schema.IsTransactionOver)
	}
	if err := t.tx.Commit(); err != nil {
		return t.broken(ctx, err, t.repository.schema.IsBrokenByHandler)
	}
	return nil
}

// Rollback implements [inbox.Transaction]. There is nothing to do when database/sql has rolled back
// because the context ended, or the database has by itself.
func (t *transaction) Rollback() error {
	err := t.tx.Rollback()
	if err == nil || errors.Is(err, sql.ErrTxDone) || t.repository.schema.IsTransactionOver(err) {
		return nil
	}
	return err
}

// broken tells the handler's faults from the server's. With a live context only the handler can have ended
// the transaction.
func (t *transaction) broken(ctx context.Context, err error, byHandler func(error) bool) error {
	if ctx.Err() == nil && !errors.Is(err, driver.ErrBadConn) && (errors.Is(err, sql.ErrTxDone) || byHandler(err)) {
		return fmt.Errorf("%w: %w", inbox.ErrTransactionBroken, err)
	}
	return err
}

// exec runs a statement in the transaction and returns the number of rows affected; an empty one does
// nothing.
func (t *transaction) exec(ctx context.Context, query Query) (int64, error) {
	if query.Query == "" {
		return 0, nil
	}
	result, err := t.tx.ExecContext(ctx, query.Query, query.Args...)
	if err != nil {
		return 0, err
	}
	return result.RowsAffected()
}

func (t *transaction) keyParams() KeyParams {
	return KeyParams{Table: t.repository.table(), Key: t.key}
}

func (t *transaction) proofParams() ProofParams {
	return ProofParams{KeyParams: t.keyParams(), Driver: t.repository.db.Driver()}
}
