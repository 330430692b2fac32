package inboxpgx

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	inbox "github.com/devmappa/watermill-inbox"
	inboxsql "github.com/devmappa/watermill-inbox/sql"
)

// TxFromContext returns the transaction in which the message is claimed. All that the handler writes
// through it is committed together with the claim, or not at all. The handler must neither commit nor
// roll it back, and closes its rows and batch results before it returns. It returns false outside of a
// handler and once the transaction has ended.
func TxFromContext(ctx context.Context) (pgx.Tx, bool) {
	t, ok := inbox.TransactionFromContext[*transaction](ctx)
	if !ok {
		return nil, false
	}
	return t.handlerTx, true
}

// ContextWithTx returns a context in which [TxFromContext] finds the transaction, to unit-test a handler
// without a router: begin a transaction, call the handler, look at what it wrote, roll back.
func ContextWithTx(ctx context.Context, tx pgx.Tx) context.Context {
	return inbox.ContextWithTransaction(ctx, &transaction{handlerTx: tx})
}

// endTimeout bounds what is done for a transaction after its context has ended.
const endTimeout = 5 * time.Second

type transaction struct {
	repository *Repository
	key        inbox.Key
	ctx        context.Context // the transaction does not outlive it
	unwatch    func() bool     // false: ctx has ended, and the connection is kill's
	done       bool            // committed, rolled back or killed

	pooled    *pgxpool.Conn
	guard     guard
	tx        pgx.Tx // pgx's own
	handlerTx pgx.Tx // the same behind the guard
}

func newTransaction(ctx context.Context, r *Repository, pooled *pgxpool.Conn, key inbox.Key) *transaction {
	return &transaction{
		repository: r, key: key, ctx: ctx, unwatch: func() bool { return true },
		pooled: pooled, guard: guard{conn: pooled.Conn()},
	}
}

// claim begins and claims the key, or returns the record of the one who did before.
func (t *transaction) claim(ctx context.Context) (*inbox.Record, error) {
	claim := t.repository.schema.ClaimQuery(t.keyParams()).Query
	tag, err := t.begin(ctx, claim)
	// Twice, since a cleaner may delete the record between the claim and the look at it.
	for try := 1; ; try++ {
		if err != nil {
			return nil, fmt.Errorf("cannot claim: %w", err)
		}
		if tag.RowsAffected() == 1 {
			return nil, nil
		}
		if record, err := t.record(ctx); err != nil || record != nil {
			return record, err
		}
		if try == 2 {
			return nil, inbox.ErrNoRecord
		}
		tag, err = t.tx.Exec(ctx, claim)
	}
}

// begin sends BEGIN and a statement in one round trip and returns the statement's tag. Afterwards t.tx is
// open, or closed if nothing was begun.
//
// A pgx.Batch can begin a transaction, but sends its statements in the pool's mode: in the default mode it
// would prepare each claim's text, which takes a round trip more and which poolers do not carry. So the
// text is sent with the simple protocol, and the batch, which then has nothing left to send, gives what
// cannot be made otherwise: pgx's own transaction, with all its abilities.
func (t *transaction) begin(ctx context.Context, statement string) (pgconn.CommandTag, error) {
	batch := &pgx.Batch{}
	batch.BeginTx(t.repository.txOptions)
	begin := batch.QueuedQueries[0].SQL
	batch.QueuedQueries = nil

	tag, err := t.guard.conn.Exec(ctx, begin+";\n"+statement)
	results := t.guard.conn.SendBatch(ctx, batch)
	t.tx = results.Tx()
	_ = results.Close()
	t.handlerTx = &tx{Tx: t.tx, guard: &t.guard}
	return tag, err
}

// record returns nil if there is none.
func (t *transaction) record(ctx context.Context) (*inbox.Record, error) {
	var (
		record      *inbox.Record
		processedAt int64
		produced    []byte
	)
	query := t.repository.schema.RecordQuery(t.keyParams())
	err := read(ctx, t.guard.conn, query, []any{&processedAt, &produced}, func() {
		record = &inbox.Record{ProcessedAt: time.UnixMicro(processedAt), Produced: produced}
	})
	if err != nil {
		return nil, fmt.Errorf("cannot read the record: %w", err)
	}
	return record, nil
}

// watch ends the transaction with its context, whatever the handler is doing then.
func (t *transaction) watch() { t.unwatch = context.AfterFunc(t.ctx, t.kill) }

// kill ends the transaction while the handler may be using the connection in another goroutine. Nothing of
// pgx may be touched then, except what a cancel request needs; but a net.Conn may be closed at any time.
// Whoever uses it gets an error, the server sees the end of the connection and rolls back, and the pool
// forgets it.
func (t *transaction) kill() {
	ctx, cancel := context.WithTimeout(context.Background(), endTimeout)
	defer cancel()
	conn := t.guard.conn.PgConn()
	_ = conn.CancelRequest(ctx) // without it the server sees the end only after a running statement
	_ = conn.Conn().Close()
	t.pooled.Hijack()
}

// Store implements [inbox.Transaction].
func (t *transaction) Store(ctx context.Context, produced []byte) (time.Time, error) {
	if err := t.guard.enter(); err != nil {
		return time.Time{}, broken(err, t.repository.schema.IsTransactionOver)
	}
	defer t.guard.leave()
	query := t.repository.schema.StoreQuery(inboxsql.StoreParams{KeyParams: t.keyParams(), Produced: produced})
	var processedAt int64
	err := t.tx.QueryRow(ctx, query.Query, pgx.QueryExecModeExec).Scan(&processedAt)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return time.Time{}, fmt.Errorf("%w: the claim is gone from it", inbox.ErrTransactionBroken)
	case err != nil:
		return time.Time{}, broken(err, t.repository.schema.IsTransactionOver)
	}
	return time.UnixMicro(processedAt), nil
}

// Commit implements [inbox.Transaction].
func (t *transaction) Commit(ctx context.Context) error {
	if err := t.end(func() error { return t.tx.Commit(ctx) }); err != nil {
		return broken(err, t.repository.schema.IsBrokenByHandler)
	}
	return nil
}

// Rollback implements [inbox.Transaction]. There is nothing to do when the transaction has been killed. It
// tells that the connection is lost, which may be the reason for a handler's error.
func (t *transaction) Rollback() error {
	err := t.end(func() error {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.ctx), endTimeout)
		defer cancel()
		if err := t.tx.Rollback(ctx); err != nil {
			return fmt.Errorf("%w: %w", errLost, err) // pgx has closed it
		}
		return nil
	})
	if errors.Is(err, errLost) {
		return err
	}
	return nil
}

// end runs the last step with the connection for itself, and gives the connection back to the pool, which
// keeps it if it is idle and outside of a transaction.
func (t *transaction) end(step func() error) error {
	if t.done {
		return pgx.ErrTxClosed
	}
	t.done = true
	if !t.unwatch() {
		return context.Cause(t.ctx)
	}
	if !t.guard.mutex.TryLock() {
		// In the middle of a statement of a goroutine that the handler has left behind.
		t.kill()
		return errInUse
	}
	defer t.guard.mutex.Unlock()
	defer t.pooled.Release()
	err := t.guard.usable()
	t.guard.over = true
	if err != nil {
		return err
	}
	return step()
}

// broken tells the handler's faults from the server's. Nobody but the handler closes the transaction before
// its end.
func broken(err error, byHandler func(error) bool) error {
	is := func(fault error) bool { return errors.Is(err, fault) }
	if slices.ContainsFunc([]error{pgx.ErrTxClosed, pgx.ErrTxCommitRollback, errInUse, errUnread}, is) || byHandler(err) {
		return fmt.Errorf("%w: %w", inbox.ErrTransactionBroken, err)
	}
	return err
}

func (t *transaction) keyParams() inboxsql.KeyParams {
	return inboxsql.KeyParams{Table: t.repository.table(), Key: t.key}
}
