package inbox_test

import (
	"testing"
	"time"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/inboxtest"
)

func TestConstructorsRefuse(t *testing.T) {
	t.Parallel()
	repository := inboxtest.NewMemoryRepository()
	if _, err := inbox.NewMiddleware(nil, inbox.Options{}); err == nil {
		t.Error("nil repository accepted")
	}
	if _, err := inbox.NewMiddleware(repository, inbox.Options{ClaimTimeout: -1}); err == nil {
		t.Error("negative claim timeout accepted")
	}
	if _, err := inbox.NewCleaner(nil, inbox.CleanerOptions{Retention: time.Hour}); err == nil {
		t.Error("nil repository accepted")
	}
	for name, options := range map[string]inbox.CleanerOptions{
		"no retention":        {},
		"negative retention":  {Retention: -time.Hour},
		"negative batch size": {Retention: time.Hour, BatchSize: -1},
		"negative pause":      {Retention: time.Hour, BatchPause: -1},
		"negative interval":   {Retention: time.Hour, Interval: -1},
	} {
		if _, err := inbox.NewCleaner(repository, options); err == nil {
			t.Errorf("%s accepted", name)
		}
	}
}
