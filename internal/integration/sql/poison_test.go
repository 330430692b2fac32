package sql_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	watermillsql4 "github.com/ThreeDotsLabs/watermill-sql/v4/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/internal/integration/testdb"
	inboxsql "github.com/devmappa/watermill-inbox/sql"
)

// A poison publisher that looks at the message's context, as watermill-sql v4 does, gets one that is alive; without
// RestoreContext it gets the dead one that Timeout has left, and nothing is ever poisoned.
func TestPoisonPublisherThatHonoursContexts(t *testing.T) {
	t.Parallel()
	retry := middleware.Retry{MaxRetries: 2, InitialInterval: time.Millisecond, MaxInterval: time.Millisecond, Multiplier: 1}
	for name, c := range map[string]struct {
		add        func(*inbox.Middleware, *message.Router, message.Publisher) error
		isPoisoned bool
	}{
		"AddTo": {func(once *inbox.Middleware, router *message.Router, poison message.Publisher) error {
			return once.AddTo(router, inbox.RouterOptions{PoisonPublisher: poison, PoisonTopic: "poison", Retry: retry, Timeout: patience})
		}, true},
		"by hand, without RestoreContext": {func(once *inbox.Middleware, router *message.Router, publisher message.Publisher) error {
			poison, err := middleware.PoisonQueueWithFilter(publisher, "poison", inbox.ShouldPoison)
			retry := retry
			retry.ShouldRetry, retry.ResetContextOnRetry = inbox.ShouldRetry, true
			router.AddMiddleware(poison, retry.Middleware, middleware.Timeout(patience), middleware.Recoverer, once.Middleware)
			return err
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := testdb.PostgreSQL(t, "postgres")
			schema := watermillsql4.DefaultPostgreSQLSchema{}
			queries, err := schema.SchemaInitializingQueries(watermillsql4.SchemaInitializingQueriesParams{Topic: "poison"})
			if err != nil {
				t.Fatal(err)
			}
			for _, query := range queries {
				db.MustExec(t, query.Query)
			}
			poison, err := watermillsql4.NewPublisher(watermillsql4.BeginnerFromStdSQL(db.DB), watermillsql4.PublisherConfig{SchemaAdapter: schema}, watermill.NopLogger{})
			if err != nil {
				t.Fatal(err)
			}
			once, err := inbox.NewMiddleware(db.Repository(t, inboxsql.Options{}), inbox.Options{})
			if err != nil {
				t.Fatal(err)
			}
			router, err := message.NewRouter(message.RouterConfig{CloseTimeout: patience}, watermill.NopLogger{})
			if err != nil {
				t.Fatal(err)
			}
			if err := c.add(once, router, poison); err != nil {
				t.Fatal(err)
			}
			var runs atomic.Int32
			in := make(pipe)
			router.AddConsumerHandler("c", "in", in, func(msg *message.Message) error {
				runs.Add(1)
				return errors.New("no funds")
			})
			stopped := make(chan error, 1)
			go func() { stopped <- router.Run(context.Background()) }()
			<-router.Running()
			msg := message.NewMessage("m", []byte(`{}`))
			in <- msg
			acked := false
			select {
			case <-msg.Acked():
				acked = true
			case <-msg.Nacked():
			}
			if err := router.Close(); err != nil {
				t.Error(err)
			}
			<-stopped
			poisoned := db.Count(t, `SELECT count(*) FROM watermill_poison`)
			t.Logf("%d runs, acknowledged %v, %d poisoned", runs.Load(), acked, poisoned)
			if runs.Load() != 3 || acked != c.isPoisoned || poisoned != map[bool]int{true: 1}[c.isPoisoned] {
				t.Errorf("want it poisoned after 3 runs: %v", c.isPoisoned)
			}
		})
	}
}

// pipe is a subscriber that gets what is put into it.
type pipe chan *message.Message

func (p pipe) Subscribe(context.Context, string) (<-chan *message.Message, error) { return p, nil }

func (p pipe) Close() error {
	close(p)
	return nil
}
