package pgx_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/inboxtest"
	"github.com/devmappa/watermill-inbox/internal/integration/testdb"
	inboxpgx "github.com/devmappa/watermill-inbox/pgx"
)

const patience = 30 * time.Second

// database is a test's own, with a pgx pool. What the test looks at goes through database/sql beside it.
type database struct {
	*testdb.Database
	pool *pgxpool.Pool
}

func newDatabase(t testing.TB, configure ...func(*pgxpool.Config)) *database {
	t.Helper()
	return newDatabaseOn(t, testdb.PostgreSQL(t, "postgres"), configure...)
}

func newDatabaseOn(t testing.TB, db *testdb.Database, configure ...func(*pgxpool.Config)) *database {
	t.Helper()
	config, err := pgxpool.ParseConfig(db.URL)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range configure {
		f(config)
	}
	pool, err := pgxpool.NewWithConfig(context.Background(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		wantIdle(t, pool)
		pool.Close()
	})
	return &database{Database: db, pool: pool}
}

// oneConnection makes the next message use what the one before has left.
func oneConnection(config *pgxpool.Config) { config.MaxConns = 1 }

// repository makes a repository on the pool and its schema.
func (d *database) repository(t testing.TB, options inboxpgx.Options) *inboxpgx.Repository {
	t.Helper()
	repository, err := inboxpgx.NewRepository(d.pool, options)
	if err != nil {
		t.Fatal(err)
	}
	if err := repository.InitializeSchema(context.Background()); err != nil {
		t.Fatal(err)
	}
	return repository
}

// subject is the database as the kit's subject.
func (d *database) subject(t testing.TB, options inboxpgx.Options) inboxtest.RepositorySubject {
	t.Helper()
	return inboxtest.RepositorySubject{
		Repository: d.repository(t, options),
		Write:      write,
		Effects:    d.Effects,
		HasTransaction: func(ctx context.Context) bool {
			_, ok := inboxpgx.TxFromContext(ctx)
			return ok
		},
		Age:     d.Age,
		End:     func(ctx context.Context) error { return handlerTx(ctx).Commit(ctx) },
		Abandon: func(ctx context.Context) error { return handlerTx(ctx).Rollback(ctx) },
		FailStatement: func(ctx context.Context) error {
			_, err := handlerTx(ctx).Exec(ctx, "SELECT no_such_column FROM effects")
			return err
		},
	}
}

// write writes an effect through the handler's transaction.
func write(ctx context.Context, effect string) error {
	tx, ok := inboxpgx.TxFromContext(ctx)
	if !ok {
		return errors.New("no transaction in the context")
	}
	_, err := tx.Exec(ctx, `INSERT INTO effects (effect) VALUES ($1)`, effect)
	return err
}

func handlerTx(ctx context.Context) pgx.Tx {
	tx, _ := inboxpgx.TxFromContext(ctx)
	return tx
}

// wrap returns the handler behind the inbox, under consumer "c", without a router.
func wrap(t testing.TB, repository inbox.Repository, options inbox.Options, handler message.NoPublishHandlerFunc) message.HandlerFunc {
	t.Helper()
	options.Consumer = func(string) string { return "c" }
	m, err := inbox.NewMiddleware(repository, options)
	if err != nil {
		t.Fatal(err)
	}
	return m.Middleware(func(msg *message.Message) ([]*message.Message, error) { return nil, handler(msg) })
}

func newMessage(id string) *message.Message { return message.NewMessage(id, []byte(id)) }

// wantIdle fails the test if a connection is not given back.
func wantIdle(t testing.TB, pool *pgxpool.Pool) {
	t.Helper()
	// The pool closes connections in goroutines of its own.
	eventually(t, "no connection is in use", func() bool { return pool.Stat().AcquiredConns() == 0 })
}

// eventually waits for what no signal tells: a state inside the pool or the server.
func eventually(t testing.TB, what string, is func() bool) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for !is() {
		if time.Now().After(deadline) {
			t.Fatalf("not within %s: %s", patience, what)
		}
		time.Sleep(5 * time.Millisecond)
	}
}
