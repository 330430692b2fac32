package inboxpgx

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/devmappa/watermill-inbox/internal/dialect"
	"github.com/devmappa/watermill-inbox/internal/engine"
)

// pool is an [engine.Pool] on a pgxpool.
type pool struct {
	*pgxpool.Pool
	txOptions pgx.TxOptions
}

var (
	_ engine.Pool = pool{}
	_ engine.Tx   = (*transaction)(nil)
)

// Driver implements [engine.Pool].
func (p pool) Driver() engine.Driver {
	return engine.Driver{ProvesWithCommit: true, FreeParameters: true}
}

// Begin implements [engine.Pool].
func (p pool) Begin(ctx context.Context, opening engine.Opening) (engine.Tx, int64, error) {
	options := p.txOptions
	// Pgx's own Commit sends it, so that its transaction is closed with ours. When the proof fails the server goes no further.
	_, proof := dialect.PostgreSQL{}.Proof()
	options.CommitQuery = proof.Text + ";\n" + cmp.Or(options.CommitQuery, "commit")
	return p.begin(ctx, options, opening.First.Text)
}

// BeginShort implements [engine.Pool].
func (p pool) BeginShort(ctx context.Context) (engine.Tx, error) {
	tx, _, err := p.begin(ctx, pgx.TxOptions{}, "")
	return tx, err
}

func (p pool) begin(ctx context.Context, options pgx.TxOptions, first string) (engine.Tx, int64, error) {
	conn, err := p.Acquire(ctx)
	if err != nil {
		return nil, 0, err
	}
	if conn.Conn().PgConn().TxStatus() != 'I' {
		conn.Release() // which closes it
		return nil, 0, errors.New("a hook of the pool has begun a transaction")
	}
	t := newTransaction(ctx, conn)
	tag, err := t.begin(ctx, options, first)
	if err != nil {
		err = lost(conn.Conn(), err)
		t.unfit = dialect.CannotWrite(err)
		_ = t.Rollback() // the statement's error says more
		return nil, 0, err
	}
	t.watch()
	return t, tag.RowsAffected(), nil
}

// lost marks the error of a connection that is gone.
func lost(conn *pgx.Conn, err error) error {
	if err != nil && conn.IsClosed() {
		return fmt.Errorf("%w: %w", engine.ErrConnectionLost, err)
	}
	return err
}

// Exec implements [engine.Executor].
func (p pool) Exec(ctx context.Context, statement string, args ...any) (int64, error) {
	tag, err := p.Pool.Exec(ctx, statement, args...)
	return tag.RowsAffected(), err
}

// Query implements [engine.Executor].
func (p pool) Query(ctx context.Context, query dialect.Query, destinations []any, each func() error) error {
	return p.AcquireFunc(ctx, func(conn *pgxpool.Conn) error {
		err := read(ctx, conn.Conn(), query, destinations, each)
		if dialect.CannotWrite(err) {
			_ = conn.Conn().Close(ctx)
			return err
		}
		return lost(conn.Conn(), err)
	})
}

// read takes one round trip and leaves nothing on the server or in the caches, whatever mode the pool has.
// Results are binary: as text, bytes depend on the server's bytea_output.
func read(ctx context.Context, conn *pgx.Conn, query dialect.Query, destinations []any, each func() error) error {
	values, types, formats := make([][]byte, len(query.Args)), make([]uint32, len(query.Args)), make([]int16, len(query.Args))
	for i, arg := range query.Args {
		values[i], types[i], formats[i] = arg.([]byte), pgtype.ByteaOID, pgx.BinaryFormatCode
	}
	result := conn.PgConn().ExecParams(ctx, query.Text, values, types, formats, []int16{pgx.BinaryFormatCode})
	destinations = slices.Clone(destinations)
	for i, destination := range destinations {
		if scanner, ok := destination.(sql.Scanner); ok {
			destinations[i] = scannerOfBytes{scanner}
		}
	}
	_, err := pgx.ForEachRow(pgx.RowsFromResultReader(conn.TypeMap(), result), destinations, each)
	return err
}

// scannerOfBytes gives a scanner what pgx has read, which pgx would copy into a string.
type scannerOfBytes struct{ sql.Scanner }

// ScanBytes implements [pgtype.BytesScanner].
func (s scannerOfBytes) ScanBytes(value []byte) error { return s.Scan(value) }

// endTimeout bounds what is done for a transaction after its context has ended.
const endTimeout = 5 * time.Second

// transaction is an [engine.Tx].
type transaction struct {
	ctx       context.Context // the transaction does not outlive it
	unwatch   func() bool     // false: ctx has ended, and the connection is kill's
	done      bool            // committed, rolled back or killed
	committed bool
	unfit     bool // see dialect.CannotWrite

	pooled    *pgxpool.Conn
	guard     guard
	tx        pgx.Tx // pgx's own
	handlerTx pgx.Tx // the same behind the guard
}

func newTransaction(ctx context.Context, pooled *pgxpool.Conn) *transaction {
	return &transaction{ctx: ctx, unwatch: func() bool { return true }, pooled: pooled, guard: guard{conn: pooled.Conn()}}
}

// begin sends BEGIN and a statement in one round trip and returns the statement's tag. Afterwards t.tx is
// open, or closed if nothing was begun.
//
// A pgx.Batch can begin a transaction, but sends its statements in the pool's mode: in the default mode it
// would prepare each claim's text, which takes a round trip more and which poolers do not carry. So the
// text is sent with the simple protocol, and the batch, which then has nothing left to send, gives what
// cannot be made otherwise: pgx's own transaction, with all its abilities.
func (t *transaction) begin(ctx context.Context, options pgx.TxOptions, statement string) (pgconn.CommandTag, error) {
	batch := &pgx.Batch{}
	batch.BeginTx(options)
	begin := batch.QueuedQueries[0].SQL
	batch.QueuedQueries = nil

	tag, err := t.guard.conn.Exec(ctx, begin+";\n"+statement)
	results := t.guard.conn.SendBatch(ctx, batch)
	t.tx = results.Tx()
	_ = results.Close()
	t.handlerTx = &tx{Tx: t.tx, guard: &t.guard}
	return tag, err
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

// Exec implements [engine.Executor].
func (t *transaction) Exec(ctx context.Context, statement string, args ...any) (int64, error) {
	tag, err := t.handlerTx.Exec(ctx, statement, args...)
	t.unfit = t.unfit || dialect.CannotWrite(err)
	return tag.RowsAffected(), err
}

// Query implements [engine.Executor].
func (t *transaction) Query(ctx context.Context, query dialect.Query, destinations []any, each func() error) error {
	if err := t.guard.enter(); err != nil {
		return err
	}
	defer t.guard.leave()
	err := read(ctx, t.guard.conn, query, destinations, each)
	t.unfit = t.unfit || dialect.CannotWrite(err)
	return lost(t.guard.conn, err)
}

// Commit implements [engine.Tx]. The proof is in the commit query, see Begin. What has failed is rolled back here, because
// pgx would give up the connection.
func (t *transaction) Commit(ctx context.Context, _ dialect.Query) error {
	return t.end(func() error {
		if t.guard.conn.PgConn().TxStatus() == 'E' {
			_ = t.tx.Rollback(ctx)
			return pgx.ErrTxCommitRollback
		}
		err := t.tx.Commit(ctx)
		t.committed = err == nil
		return err
	})
}

// Rollback implements [engine.Tx]. That the connection is lost may be the reason for a handler's error.
func (t *transaction) Rollback() error {
	if t.committed {
		return nil
	}
	err := t.end(func() error {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.ctx), endTimeout)
		defer cancel()
		if t.unfit {
			return t.guard.conn.Close(ctx) // the server rolls back
		}
		if err := t.tx.Rollback(ctx); err != nil {
			return fmt.Errorf("%w: %w", errLost, err) // pgx has closed it
		}
		return nil
	})
	if errors.Is(err, errLost) || t.IsEnded(err) {
		return err
	}
	return nil // the connection is closed, and the server rolls back
}

// end runs the last step with the connection for itself, and gives the connection back to the pool, which
// keeps it if it is idle and outside of a transaction.
func (t *transaction) end(step func() error) error {
	if t.done {
		return nil
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

// IsEnded implements [engine.Tx].
func (t *transaction) IsEnded(err error) bool { return errors.Is(err, pgx.ErrTxClosed) }

// IsBroken implements [engine.Tx]. Nobody but the handler closes the transaction before its end.
func (t *transaction) IsBroken(err error) bool {
	return slices.ContainsFunc([]error{pgx.ErrTxClosed, pgx.ErrTxCommitRollback, errInUse, errUnread}, func(fault error) bool { return errors.Is(err, fault) })
}
